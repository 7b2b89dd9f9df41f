"""Run models of real shapes against llama.cpp and torch: tokens per second, memory bandwidth, start-up, memory.

The models are created on first use in build/bench (6 GB): shapes of synthetic.py, quantized by polyquant.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import polyquant
from measure import Row, Section, middle
from peers import PROGRAMS, llama_bench, program
from polyquant.ops import native
from polyquant.types import Kind, Meta
from synthetic import BITNET_2B, write_bitnet, write_llama

HERE = Path(__file__).resolve().parent
MODELS = HERE.parent / "build" / "bench"
AVX512 = "AVX-512" in native.instruction_set()
PREFILL = {"q4_0": 2.0, "q8_0": 2.0, "q4_k": 2.0, "q6_k": 1.4, "iq4_xs": 1.4, "tq2_0": 2.0, "i2_s": 2.0}
"""Bars of a prefill against llama.cpp, with AVX-512 VNNI; with less they are 1.5."""
GROUPED = ("compressed.p4.g32.f16", "compressed.p4.g128", "mlx.4.g64", "gptq.4.g128", "awq.4.g128")
ROUNDS = 3


def floats() -> Path:
    """Return the 1B Llama as a folder of bfloat16."""
    folder = MODELS / "llama-1b"
    if not folder.exists():
        write_llama(folder)
    return folder


def llama(codec: str) -> Path:
    """Return the 1B Llama in `codec`."""
    file = MODELS / f"{codec}.gguf"
    if not file.exists():
        convert(floats(), file, codec)
    return file


def hub(codec: str) -> Path:
    """Return the 1B Llama as a folder, with its head in `codec` too."""
    folder = MODELS / codec
    if not folder.exists():
        polyquant.quantize(floats(), folder, codec=codec, rules=[f"lm_head*={codec}"])
    return folder


def bitnet(codec: str, **how: str) -> Path:
    """Return a BitNet of the 2B4T shape in `codec`, with the tied embedding in q6_k."""
    folder, file = MODELS / "bitnet-2b", MODELS / f"bitnet-{codec}.gguf"
    if not file.exists():
        if not folder.exists():
            write_bitnet(folder)
        convert(folder, file, codec, rules=["*token_embd*=q6_k"], **how)
    return file


def convert(folder: Path, file: Path, codec: str, **how: object) -> None:
    """Convert to GGUF, with the key that lets llama.cpp load it without a tokenizer."""
    polyquant.quantize(folder, file, to="gguf", codec=codec, **how)
    keys = {"tokenizer.ggml.model": Meta(Kind.STRING, "no_vocab")}
    if "architecture" in how:  # otherwise llama.cpp takes the size from the tokenizer
        keys[f"{how['architecture']}.vocab_size"] = Meta(Kind.UINT32, BITNET_2B["vocab_size"])
    polyquant.edit(file, set=keys)


def reader(threads: int, size: int) -> Callable[[], object]:
    """Return a function that reads `size` bytes with `threads` threads, by memchr for an absent byte."""
    memory = ctypes.create_string_buffer(size)
    base, part = ctypes.addressof(memory), size // threads
    find = ctypes.CDLL(None).memchr
    find.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    ctypes.memset(base, 1, size)
    pool = ThreadPoolExecutor(threads)
    return lambda: (list(pool.map(lambda i: find(base + i * part, 2, part), range(threads))), memory)


def bandwidth(threads: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the memory bandwidth in bytes per second: the best of five runs over 1 GiB.

    clock: time.process_time for one thread on a busy machine.
    """
    size, taken = 1 << 30, []
    read = reader(threads, size)
    for _ in range(5):
        start = clock()
        read()
        taken.append(clock() - start)
    return size / min(taken)


def child(engine: str, path: Path, threads: int, prefill: int = 0, decode: int = 24) -> dict:
    """Return the figures of one process."""
    done = subprocess.run(
        [sys.executable, HERE / "run_child.py", engine, path, *map(str, (threads, prefill, decode))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{engine} on {path.name}: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.splitlines()[-1])


def engines(theirs: Path, threads: int, prefill: int) -> dict[str, Callable[[], dict]]:
    """Return a run of each installed peer: llama.cpp by its library, else by its llama-bench, and ik_llama.cpp."""
    found: dict[str, Callable[[], dict]] = {}
    for peer in PROGRAMS:
        if (path := program(peer)) is not None:
            found[peer] = partial(llama_bench, path, theirs, threads, prefill, 24)
    if find_spec("llama_cpp") is not None:
        found["llama.cpp"] = partial(child, "llama.cpp", theirs, threads, prefill)
    return found


def side_by_side(ours: Path, theirs: Path, threads: int, prefill: int) -> tuple[dict, dict[str, dict]]:
    """Return medians of alternating runs: ours, and of each peer that does not fail."""
    peers = engines(theirs, threads, prefill)
    mine: list[dict] = []
    others: dict[str, list[dict]] = {peer: [] for peer in peers}
    for _ in range(ROUNDS):
        mine.append(child("ours", ours, threads, prefill))
        for peer in list(peers):
            try:
                others[peer].append(peers[peer]())
            except RuntimeError as problem:
                print(f"no figures of {peer}: {problem}", file=sys.stderr)
                del peers[peer]

    def medians(runs: list[dict]) -> dict:
        return {key: middle([run[key] for run in runs]) for key in runs[0]}

    return medians(mine), {peer: medians(others[peer]) for peer in peers}


def decode_rows(label: str, ours: Path, theirs: Path, prefill: float) -> Iterator[Row]:
    """Yield rows for one and two threads, and a prefill of 512 tokens with two."""
    for threads in (1, 2):
        mine, peers = side_by_side(ours, theirs, threads, 512 if threads == 2 else 0)
        peer, fork = (peers.get(name) for name in PROGRAMS)
        extra = {"of floor": mine["read"] * mine["decode"] / bandwidth(threads), "outside kernels": mine["outside"]}
        extra |= {"ik_llama.cpp": fork["decode"]} if fork else {}
        yield Row(
            f"{label}, decode, {threads} threads", "tokens/s", mine["decode"], peer and peer["decode"], 1.0, True, extra
        )
        if threads == 2:
            extra = {"ik_llama.cpp": fork["prefill"]} if fork else {}
            theirs_too, bar = peer and peer["prefill"], prefill if AVX512 else 1.5
            yield Row(f"{label}, prefill 512", "tokens/s", mine["prefill"], theirs_too, bar, True, extra)


def rows() -> Iterator[Row]:
    """Bars: decode as fast as llama.cpp, 4-bit groups at 0.9 of Q4_0, first token within 1 s, memory of file + 10 % +
    cache."""
    for codec in ("q4_0", "q8_0", "q4_k", "iq4_xs", "tq2_0", "q6_k"):
        yield from decode_rows(codec, llama(codec), llama(codec), PREFILL[codec])
    ternary = bitnet("i2_s.x86"), bitnet("tq2_0", architecture="bitnet")
    yield from decode_rows("BitNet 2B4T: i2_s, peer tq2_0", *ternary, PREFILL["i2_s"])
    for codec in GROUPED:
        runs = [(child("ours", hub(codec), 2), child("ours", llama("q4_0"), 2)) for _ in range(ROUNDS)]
        mine, peer = (middle([run["decode"] for run in side]) for side in zip(*runs, strict=True))
        yield Row(f"{codec}, decode, 2 threads, peer our q4_0", "tokens/s", mine, peer, 0.9, more=True)
    start = [child("ours", llama("q8_0"), 2, 0, 0) for _ in range(ROUNDS)]
    yield Row("q8_0, 1.17 GB: import, load, first token", "s", middle([r["first"] for r in start]), 1.0, 1.0)
    yield Row("q8_0, 1.17 GB: load, first token", "s", middle([r["loaded"] for r in start]), 0.15, 1.0)
    whole = child("ours", llama("q8_0"), 2, 512, 24)
    yield Row(
        "q8_0: peak memory, file + 10 % + cache", "MB", whole["rss"] / 1e6, (1.10 * whole["file"] + 24e6) / 1e6, 1.0
    )
    share = child("ours", llama("q4_k"), 2, 0, 64)["outside"]
    yield Row("q4_k: time outside kernels", "%", 100 * share, 5.0, 1.0)
    if find_spec("torch") and find_spec("transformers"):
        mine, peer = child("ours", floats(), 2, 512, 8), child("torch", floats(), 2, 512, 8)
        yield Row("bf16 folder, decode, 2 threads, peer torch", "tokens/s", mine["decode"], peer["decode"], more=True)
        yield Row("bf16 folder, prefill 512, peer torch", "tokens/s", mine["prefill"], peer["prefill"], more=True)


SECTION = Section(
    "run a 1B Llama and a 2B BitNet, against llama.cpp and torch", rows, peers=("llama-cpp-python", "torch")
)
