"""Mutated files and folders through every reader: open, inspect, validate, parts, plan.

Seeded; only PolyquantError may be raised.

PYTHONPATH=tests python -m fuzz.readers SEED [ROUNDS]     runs ROUNDS rounds from that seed, stops at a failure

A failure prints its seed and leaves the input in the printed folder, so that one command reproduces it.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import folders
import polyquant
from formats import gguf_files
from golden import VECTORS
from polyquant.errors import PolyquantError

LIMIT = 2.0
"""Seconds of processor time for one input."""
KEPT = 200_000
"""Larger files are truncated to this size before they are mutated: errors are most likely in headers."""


def subjects() -> list[Path]:
    """Small files and folders of every kind that is read."""
    files = [
        *gguf_files.GGUF_VECTORS,
        *sorted((VECTORS / "bitnet_gguf").glob("*.gguf")),
        *sorted((VECTORS / "hf_bin").glob("*.bin")),
    ]
    models = [
        VECTORS / "models/tiny-llama-tied/hf",
        VECTORS / "bitnet_gguf/hf_packed_autobitlinear",
        VECTORS / "hf_bin",
        *(
            VECTORS / "hub_readonly" / name
            for name in ("bnb-forms", "bnb-int8", "hqq-forms", "torchao-int4", "torchao-float8", "quark-uint4")
        ),
        *(
            VECTORS / "trellis" / name
            for name in ("v3_seed_kn", "v3_seed_mm_headers", "v3_migrated", "v3_shard_writer")
        ),
        *(
            VECTORS / "msmodelslim" / name
            for name in (
                "v1/bf16/w8a8_mix",
                "v0/fp16/w8a8_c8_sharded",
                "v0/fp16/ascendv1_w4a8_dynamic_g32",
                "v0/fp16/w8a8s_lowbit_smooth",
            )
        ),
    ]
    quantized = [
        VECTORS / f"models/tiny-llama-tied/tiny-llama-tied-{name}.gguf" for name in ("Q4_0", "Q4_K_M-bigendian")
    ]
    return [
        *files,
        *quantized,
        VECTORS / "bitnet_gguf/hf_packed_bitlinear/model.safetensors",
        VECTORS / "trellis/exl3_tensors.safetensors",
        *models,
    ]


def make(seed: int, folder: Path) -> Path:
    """The input of a seed, written into an empty folder."""
    rng = random.Random(seed)
    subject = rng.choice(subjects())
    if subject.is_dir():
        target = folder / "model"
        target.mkdir()
        names = sorted(
            p.name for p in subject.iterdir() if p.is_file() and p.suffix in (".json", ".safetensors", ".bin")
        )
        for name in names:
            shutil.copy(subject / name, target / name)
        victim = target / rng.choice(names)
    else:
        target = victim = folder / subject.name
        shutil.copy(subject, victim)
    raw = victim.read_bytes()
    if rng.random() < 0.5:
        raw = raw[:KEPT]
    head, tail = (raw, b"") if rng.random() < 0.2 else (raw[:4000], raw[4000:])  # headers come first, and matter most
    mutated = folders.mutate(head, rng) if rng.random() < 0.5 else gguf_files.mutate(head, rng.randrange(1 << 32))
    victim.write_bytes(mutated + tail)
    return target


def read_everything(path: Path) -> bool:
    """Every way to read; True if the input could be opened. Raises everything except a PolyquantError."""
    verbs: list[Callable[[], object]] = [
        lambda: polyquant.inspect(path).to_json(),
        lambda: [str(f) for f in polyquant.validate(path)],
        lambda: polyquant.plan(path, "gguf"),
        lambda: polyquant.plan(path, "hf", codec="f32"),
        lambda: [w.read() for w in polyquant.open(path).values()],
        lambda: [w.dequantize() for w in list(polyquant.open(path).values())[:3]],
    ]
    opened = True
    for verb in verbs:
        try:
            verb()
        except PolyquantError as e:
            assert "\n" not in str(e), str(e)
            opened = opened and verb is not verbs[0]
    return opened


def attempt(seed: int) -> bool:
    """One input. Raises AssertionError with the seed and the file of the input."""
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{seed}-"))
    start = time.process_time()
    try:
        opened = read_everything(make(seed, folder))
    except Exception as e:
        raise AssertionError(f"seed {seed}, input left in {folder}:\n{traceback.format_exc()}") from e
    took = time.process_time() - start
    assert took < LIMIT, f"seed {seed} took {took:.1f} s, input left in {folder}"
    shutil.rmtree(folder)
    return opened


if __name__ == "__main__":
    first, rounds = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    print(sum(attempt(seed) for seed in range(first, first + rounds)), "of", rounds, "could be opened")
