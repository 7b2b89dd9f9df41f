"""Run one model with one engine in its own process and print the figures as JSON.

    python bench/run_child.py ours|llama.cpp|torch FILE THREADS PREFILL DECODE

In a shared process the thread pools of two engines would compete.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

CLOCK = time.perf_counter  # for `measure`; time.thread_time for one thread, independent of other load
TOKENS = (np.arange(4096) * 7919 % 31000).astype(np.int32)


def measure(
    step: Callable[[np.ndarray], object],
    restart: Callable[[], object],
    prefill: int,
    decode: int,
    inside: Callable[[], float] = lambda: 0.0,
) -> dict:
    """Measure decode (median over single tokens) and prefill (one run over all).

    step: processes these tokens. inside: seconds spent in kernels.
    """
    step(TOKENS[:8])
    taken, before = [], inside()
    for i in range(decode):
        start = CLOCK()
        step(TOKENS[i : i + 1])
        taken.append(CLOCK() - start)
    out = {"decode": 1 / median(taken), "outside": 1 - (inside() - before) / sum(taken)} if decode else {}
    if prefill:
        restart()
        start = CLOCK()
        step(TOKENS[:prefill])
        out["prefill"] = prefill / (CLOCK() - start)
    return out


def ours(path: str, threads: int, prefill: int, decode: int) -> dict:
    """Measure polyquant. first: seconds from before its import to the first token; loaded: from after
    it. read: bytes read per token."""
    start = time.perf_counter()
    import polyquant
    from polyquant.ops import native

    load = polyquant.load  # imported on first use
    imported = time.perf_counter()
    model = load(path, threads=threads)
    state = [model.session()]
    state[0].feed(TOKENS[:1])
    first, loaded = time.perf_counter() - start, time.perf_counter() - imported

    def restart() -> None:
        state[0] = model.session()

    out = measure(lambda t: state[0].feed(t), restart, prefill, decode, native.kernel_seconds)
    table, names = model.decoder.embed.table, model.checkpoint.weights
    tied = not {"output.weight", "lm_head.weight"} & set(names)
    size = model.checkpoint.nbytes
    return out | {"first": first, "loaded": loaded, "file": size, "read": size - (0 if tied else table.nbytes)}


def llama_cpp(path: str, threads: int, prefill: int, decode: int) -> dict:
    """Measure llama.cpp through the library of llama-cpp-python, with its defaults."""
    import llama_cpp as lib

    lib.llama_backend_init()
    start = time.perf_counter()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    if not model:
        raise SystemExit("llama.cpp does not load this file")
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = 1024, 512, 512
    settings.n_threads = settings.n_threads_batch = threads
    context = lib.llama_init_from_model(model, settings)

    def step(tokens: np.ndarray) -> None:
        array = (ctypes.c_int32 * len(tokens))(*tokens.tolist())
        if lib.llama_decode(context, lib.llama_batch_get_one(array, len(tokens))):
            raise SystemExit("llama.cpp failed")
        lib.llama_synchronize(context)

    step(TOKENS[:1])
    first = time.perf_counter() - start
    return measure(step, lambda: lib.llama_memory_clear(lib.llama_get_memory(context), True), prefill, decode) | {
        "first": first
    }


def torch(path: str, threads: int, prefill: int, decode: int) -> dict:
    """Measure transformers in bf16."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    state: list = [None]

    @torch.no_grad()
    def step(tokens: np.ndarray) -> None:
        out = model(
            torch.from_numpy(tokens.astype(np.int64))[None], past_key_values=state[0], use_cache=True, logits_to_keep=1
        )
        state[0] = out.past_key_values

    def restart() -> None:
        state[0] = None

    step(TOKENS[:1])
    first = time.perf_counter() - start
    return measure(step, restart, prefill, decode) | {"first": first}


def peak_rss() -> int:
    """Return the peak RSS in bytes, including touched pages of mapped files."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


if __name__ == "__main__":
    engine, path, *numbers = sys.argv[1:]
    found = {"ours": ours, "llama.cpp": llama_cpp, "torch": torch}[engine](path, *map(int, numbers))
    print(json.dumps(found | {"rss": peak_rss()}))
