"""Run expert layers of Qwen3-30B-A3B's shape: tokens per second against llama.cpp, fraction of memory bandwidth.

The model is created on first use in build/bench: three layers with negligible attention and a vocabulary of 512.
llama.cpp runs all of it, including attention; polyquant runs norms, experts and head as a recorded step
(runtime/step.py). Active bytes are those of the selected experts, the routers and the head. Single-thread times are CPU
time.

    python bench/bench_experts.py ours|llama.cpp FILE THREADS      run one engine in its own process, print JSON
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import numpy as np

import polyquant
import run_child
from bench_run import MODELS, bandwidth
from measure import Row, Section

HIDDEN, WIDE, EXPERTS, USED, LAYERS, VOCAB = 2048, 768, 128, 8, 3, 512
PREFILL, DECODE, ROUNDS = 512, 48, 5
CODECS = ("q4_k", "q8_0")


def quantized(codec: str, rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return quantized rows; a stack repeats eight different experts to save time."""
    kind = polyquant.codec(codec)
    few = (min(8, shape[0]), *shape[1:]) if len(shape) == 3 else shape
    w = (rng.standard_normal((int(np.prod(few[:-1])), few[-1])) / few[-1] ** 0.5).astype(np.float32)
    (blocks,) = kind.pack(kind.quantize(w)).values()
    blocks = blocks.reshape(*few[:-1], -1)
    return np.tile(blocks, (shape[0] // few[0], 1, 1)) if len(shape) == 3 else blocks


def model(codec: str) -> Path:
    """Return the GGUF file with linears of `codec`."""
    import gguf

    file = MODELS / f"qwen3-moe-{codec}.gguf"
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    rng, kind = np.random.default_rng(0), gguf.GGMLQuantizationType[codec.upper()]
    writer = gguf.GGUFWriter(file.with_suffix(".part"), "qwen3moe")
    for key, value in (
        ("context_length", 4096), ("embedding_length", HIDDEN), ("block_count", LAYERS), ("feed_forward_length", WIDE),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1), ("attention.key_length", 64), ("attention.value_length", 64),
        ("expert_count", EXPERTS),
        ("expert_used_count", USED), ("expert_feed_forward_length", WIDE), ("vocab_size", VOCAB),
    ):  # fmt: skip
        writer.add_uint32(f"qwen3moe.{key}", value)
    writer.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen3moe.rope.freq_base", 1e6)
    writer.add_string("tokenizer.ggml.model", "no_vocab")

    def matrix(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", quantized(codec, rng, *shape), raw_dtype=kind)

    def ones(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    matrix("token_embd", VOCAB, HIDDEN)
    matrix("output", VOCAB, HIDDEN)
    ones("output_norm", HIDDEN)
    for i in range(LAYERS):
        at = f"blk.{i}."
        for name in ("attn_norm", "ffn_norm"):
            ones(at + name, HIDDEN)
        for name in ("attn_q_norm", "attn_k_norm"):
            ones(at + name, 64)
        for name, rows in (("attn_q", 128), ("attn_k", 64), ("attn_v", 64)):
            matrix(at + name, rows, HIDDEN)
        writer.add_tensor(f"{at}attn_output.weight", np.zeros((HIDDEN, 128), np.float32))
        router = (rng.standard_normal((EXPERTS, HIDDEN)) / HIDDEN**0.5).astype(np.float32)
        writer.add_tensor(f"{at}ffn_gate_inp.weight", router)
        for name in ("ffn_gate_exps", "ffn_up_exps"):
            matrix(at + name, EXPERTS, WIDE, HIDDEN)
        matrix(f"{at}ffn_down_exps", EXPERTS, HIDDEN, WIDE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.with_suffix(".part").rename(file)
    return file


def ours(path: str, threads: int) -> dict:
    """Measure norms, experts and head. read: bytes read per token."""
    from polyquant.ops import native
    from polyquant.ops.decoder import add
    from polyquant.ops.experts import Routing
    from polyquant.runtime.expert_linear import ExpertLinear
    from polyquant.runtime.experts import Experts
    from polyquant.runtime.linear import Linear
    from polyquant.runtime.norm import Norm

    native.set_threads(threads)
    weights = polyquant.open(path)
    norm = Norm(np.ones(HIDDEN, np.float32), 1e-6)

    def layer(i: int) -> Experts:
        found = [weights[f"blk.{i}.ffn_{name}.weight"] for name in ("gate_inp", "gate_exps", "up_exps", "down_exps")]
        return Experts(
            Linear(found[:1], [None], "block"),
            Routing(EXPERTS, USED, norm=True),
            ExpertLinear(found[1:3], [None, None], "block"),
            ExpertLinear(found[3:], [None], "block"),
        )

    layers, head = [layer(i) for i in range(LAYERS)], Linear([weights["output.weight"]], [None], "block")
    table = weights["token_embd.weight"].dequantize()

    def through(x: np.ndarray) -> np.ndarray:
        for experts in layers:
            x = add(x, experts(norm(x)))
        return head(norm(x[-1:]))[0]

    tape = native.module().Tape()
    with tape:
        x = native.empty(1, HIDDEN)
        x[:] = table[0]
        through(x)
    if not tape.complete:
        raise SystemExit("the recording is not complete")

    def step(tokens: np.ndarray) -> object:
        if len(tokens) > 1:
            return through(table[tokens])
        x[:] = table[tokens]
        return tape.run(0)

    stacks = [w for name, w in weights.items() if "_exps." in name]
    read = (
        sum(w.nbytes for w in stacks) * USED // EXPERTS
        + weights["output.weight"].nbytes
        + 4 * LAYERS * EXPERTS * HIDDEN
    )
    return run_child.measure(step, lambda: None, PREFILL, DECODE, native.kernel_seconds) | {"read": read}


def child(engine: str, path: Path, threads: int) -> dict:
    """Return the figures of one process."""
    done = subprocess.run(
        [sys.executable, __file__, engine, path, str(threads)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{engine} on {path.name}: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.splitlines()[-1])


def rows() -> Iterator[Row]:
    """Bars: decode and prefill at least as fast as llama.cpp; decode at 0.6 of the memory bandwidth."""
    there = find_spec("llama_cpp") is not None
    for codec in CODECS:
        file = model(codec)
        for threads in (1, 2):
            a, b, speed = [], [], []
            for _ in range(ROUNDS):
                speed.append(bandwidth(threads, time.process_time if threads == 1 else time.perf_counter))
                a.append(child("ours", file, threads))
                if there:
                    b.append(child("llama.cpp", file, threads))
            for what in ("decode", "prefill"):
                mine, peer = median(r[what] for r in a), median(r[what] for r in b) if b else None
                floor = median(r["read"] * r[what] / s for r, s in zip(a, speed, strict=True))
                extra = {"of floor": floor} if what == "decode" else {}
                yield Row(f"{codec}, {what}, {threads} threads", "tokens/s", mine, peer, 1.0, True, extra)


SECTION = Section("run a stack of experts, against llama.cpp", rows, peers=("gguf", "llama-cpp-python"))

if __name__ == "__main__":
    run_child.TOKENS %= VOCAB
    engine, path, threads = sys.argv[1:]
    if threads == "1":
        run_child.CLOCK = time.thread_time
    began = time.perf_counter()
    found = ours(path, int(threads)) if engine == "ours" else run_child.llama_cpp(path, int(threads), PREFILL, DECODE)
    print(json.dumps(found | {"seconds": time.perf_counter() - began}))
