"""Decode several streams together with one engine in its own process and print tokens per second as JSON.

    python bench/batch_child.py ours|ours-avx2|llama.cpp FILE THREADS STEPS STREAMS...

Each step computes the next token of every stream; the figure is the number of streams divided by the median step.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np

PROMPT = 16
TOKENS = (np.arange(4096) * 7919 % 31000).astype(np.int32)


def measured(step: Callable[[], object], streams: int, steps: int) -> float:
    """Return tokens per second."""
    taken = []
    step()
    for _ in range(steps):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return streams / median(taken)


def ours(path: str, threads: int, steps: int, counts: list[int], *, avx2: bool = False) -> dict[str, float]:
    """Measure the batch of polyquant, including the choice of tokens. avx2: without AVX-512."""
    import polyquant
    from polyquant.ops import native
    from polyquant.runtime.batch import Batch
    from polyquant.runtime.generate import generate

    if avx2 and not native.module().use_kernels("avx2"):
        raise SystemExit("this processor has no AVX2")
    model = polyquant.load(path, threads=threads)
    out = {}
    for n in counts:
        batch = Batch(model.decoder, model.context, parallel=n, memory=4 << 30)
        jobs = [batch.submit(generate(model, TOKENS[i : i + PROMPT].tolist(), max_tokens=None)) for i in range(n)]
        while any(job.token is None for job in jobs):
            batch.advance()
        out[str(n)] = measured(batch.advance, n, steps)
    return out


def llama_cpp(path: str, threads: int, steps: int, counts: list[int]) -> dict[str, float]:
    """Measure llama_decode with one token of each sequence, and the greedy choice of tokens."""
    import llama_cpp as lib

    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    if not model:
        raise SystemExit("llama.cpp does not load this file")
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    out = {}
    for n in counts:
        settings = lib.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = 512 * n, 512, 512, n
        settings.n_threads = settings.n_threads_batch = threads
        context = lib.llama_init_from_model(model, settings)
        batch = lib.llama_batch_init(512, 0, 1)
        chosen = [0] * n

        def decode(tokens: list[tuple[int, int, int]], context=context, batch=batch) -> None:
            """tokens: (token, position, sequence); logits of the last ones."""
            batch.n_tokens = len(tokens)
            for i, (token, position, sequence) in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, sequence
                batch.logits[i] = True
            if lib.llama_decode(context, batch):
                raise SystemExit("llama.cpp failed")
            lib.llama_synchronize(context)

        for i in range(n):
            decode([(int(TOKENS[i + j]), j, i) for j in range(PROMPT)])
        position = [PROMPT]

        def step(n=n, context=context, chosen=chosen, position=position, decode=decode) -> None:
            decode([(chosen[i], position[0], i) for i in range(n)])
            for i in range(n):
                logits = np.ctypeslib.as_array(
                    ctypes.cast(lib.llama_get_logits_ith(context, i), ctypes.POINTER(ctypes.c_float)), (vocab,)
                )
                chosen[i] = int(logits.argmax())
            position[0] += 1

        out[str(n)] = measured(step, n, steps)
        lib.llama_batch_free(batch)
        lib.llama_free(context)
    return out


if __name__ == "__main__":
    engine, path, *numbers = sys.argv[1:]
    threads, steps, *counts = map(int, numbers)
    measures = {"ours": ours, "ours-avx2": partial(ours, avx2=True), "llama.cpp": llama_cpp}
    print(json.dumps(measures[engine](path, threads, steps, counts)))
