"""msModelSlim: quantizing a 1B model, integer products, weight error against the tool's, gain of --effort max."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import numpy as np

import polyquant
from bench_convert import READ_WRITE, REPEATS, timed
from bench_run import reader
from measure import Row, Section, in_turn
from polyquant.analysis.outputs import compare_outputs
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.ops import native
from polyquant.ops.matmul import Group
from polyquant.quantizers.affine import quantize_linear
from polyquant.types import Activation, Affine
from synthetic import write_llama

SIDE = 4096
VECTORS = Path(__file__).parent.parent / "tests/vectors/msmodelslim"
DEMO = Path(polyquant.__file__).parent / "demo"


# ---------------------------------------------------------------- products


def _group(name: str, seed: int) -> tuple[Group, np.ndarray]:
    """Return a random matrix in the codec, and its floats."""
    codec = polyquant.codec(name)
    w = np.random.default_rng(seed).standard_normal((SIDE, SIDE)).astype(np.float32)
    found: Affine = codec.quantize(w)
    if codec.static:
        step, zero = np.array([0.03], np.float32), np.array([-3], np.float32)
        grid = Activation(
            step, zero, found.scale[:, 0] * step, (3 * found.codes.sum(1, dtype=np.int64)).astype(np.int32)
        )
        found = Affine(8, found.codes, found.scale, found.offset, grid)
    return Group([codec.packed(codec.pack(found), w.shape)], [SIDE]), w


def _one_token() -> Iterator[Row]:
    """Multiply several matrices in turn, more than fit in cache, so that memory bandwidth is the limit."""
    count = 8
    for threads in (1, 2):
        native.set_threads(threads)
        x = np.random.default_rng(1).standard_normal((1, SIDE)).astype(np.float32)
        for name in ("w8a8", "w8a8.dynamic", "w8a16", "w8a16.g128"):
            groups = [_group(name, i)[0] for i in range(count)]

            def run(groups: list[Group] = groups, x: np.ndarray = x) -> None:
                for group in groups:
                    group(x, "block")

            size = count * SIDE * SIDE
            seconds, reading = in_turn(run, reader(threads, size), repeats=15)
            bar = 0.8 if name.startswith("w8a8") else None
            label = f"{name} x 1 token, {threads} threads, peer read bandwidth"
            yield Row(label, "GB/s", size / seconds / 1e9, size / reading / 1e9, bar, more=True)


def _torch_runs(x: np.ndarray, w: np.ndarray, threads: int) -> dict[str, Callable[[], object]]:
    if not find_spec("torch"):
        return {}
    import torch

    torch.set_num_threads(threads)
    floats, matrix = torch.from_numpy(x), torch.from_numpy(w)
    out: dict[str, Callable[[], object]] = {"torch float32": partial(torch.nn.functional.linear, floats, matrix)}
    whole, codes = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in (x.shape, w.shape))
    if len(x) == 64:  # takes half a second
        out["torch int8 (_int_mm)"] = partial(torch._int_mm, whole, codes.T)
    torch.backends.quantized.engine = "fbgemm"
    linear = torch.ao.nn.quantized.dynamic.Linear(SIDE, SIDE)
    return out | {"torch int8 (fbgemm, 7-bit inputs)": partial(linear, floats)}


def _many_tokens() -> Iterator[Row]:
    for tokens in (4, 64, 256):
        x = np.random.default_rng(1).standard_normal((tokens, SIDE)).astype(np.float32)
        for threads in (1, 2):
            native.set_threads(threads)
            for name in ("w8a8", "w8a16"):
                group, w = _group(name, 0)
                peers = _torch_runs(x, w, threads)
                seconds = in_turn(partial(group, x, "block"), *peers.values(), repeats=9)
                speeds = [tokens * SIDE * SIDE / s / 1e9 for s in seconds]
                for peer, speed in zip(peers, speeds[1:], strict=True):
                    bar = 1.0 if name == "w8a8" and tokens == 64 else None
                    yield Row(
                        f"{name} x {tokens} tokens, {threads} threads, peer {peer}",
                        "G mul-adds/s",
                        speeds[0],
                        speed,
                        bar,
                        more=True,
                    )
                if not peers:
                    yield Row(
                        f"{name} x {tokens} tokens, {threads} threads", "G mul-adds/s", speeds[0], None, None, more=True
                    )


# ---------------------------------------------------------------- a model of 1B shape

QUANTIZE = """
import json, sys, polyquant
polyquant.quantize(sys.argv[1], sys.argv[2], to="msmodelslim", threads=2, **json.loads(sys.argv[3]))
"""


def _quantize() -> Iterator[Row]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("POLYQUANT_BENCH_DIR")) as place:
        source, target, moved = (Path(place) / name for name in ("llama-1b", "out", "moved"))
        write_llama(source)
        ranges = Path(place) / "ranges.json"
        names = [n.removesuffix(".weight") for n in polyquant.open(source) if n.endswith("_proj.weight")]
        ranges.write_text(json.dumps({name: [-4.0, 6.0] for name in names}))
        for name in ("w8a16", "w8a8", "w8a16.g128", "w8a8.dynamic"):
            options = {"codec": name} | ({"ranges": str(ranges)} if name == "w8a8" else {})
            ours, plain, memory = [], [], 0.0
            for _ in range(2 * REPEATS):  # disk speed varies
                shutil.rmtree(target, ignore_errors=True)
                seconds, peak = timed(QUANTIZE, str(source), str(target), json.dumps(options))
                ours.append(seconds)
                memory = max(memory, peak)
                written = sum(f.stat().st_size for f in target.iterdir())
                plain.append(timed(READ_WRITE, str(source), str(moved), str(written))[0])
            bar = 0.8 if name in ("w8a16", "w8a8") else None
            label = f"1B shape, bf16 > {name}, two threads"
            yield Row(f"{label}; peer reading and writing", "s", median(ours), median(plain), bar)
            yield Row(f"{label}, peak memory", "MB", memory, 500.0, 1.0)


# ---------------------------------------------------------------- errors


def _against_the_tool() -> Iterator[Row]:
    """Compare the relative RMSE of a golden folder with polyquant's for the same type."""
    for folder in sorted(p.parent for p in VECTORS.glob("v*/*/*/run.json")):
        mode = folder.name
        if any(
            word in mode for word in ("_m1", "_m2", "_m3", "_m4", "smooth", "c8", "fallback", "lowbit")
        ):  # lowbit: a scale per row, which polyquant does not have
            continue
        checkpoint, source = polyquant.open(folder), polyquant.open(VECTORS / "models" / f"qwen2_{folder.parent.name}")
        missed = np.zeros(2)
        for weight in checkpoint.values():
            if not isinstance(weight.codec, MsModelSlim):
                continue
            w = source[weight.name].dequantize()
            codec = weight.codec.configure(asymmetric="asym" in mode)
            ours = quantize_linear(codec, w, input_range=(-1.0, 1.0) if codec.static else None)
            again = (ours.codes.reshape(len(w), ours.scale.shape[1], -1) - ours.offset[:, :, None]) * ours.scale[
                :, :, None
            ]
            missed += [np.square(again.reshape(w.shape) - w).sum(), np.square(weight.dequantize() - w).sum()]
        yield Row(
            f"weight error, {folder.parent.name} {mode}; peer the tool",
            "squares",
            float(missed[0]),
            float(missed[1]),
            1.0,
        )


def _effort() -> Iterator[Row]:
    """Compare mean output errors of the layers on held-out text: plain rounding, and with calibration."""
    text = (DEMO / "held-out.txt").read_text()
    with tempfile.TemporaryDirectory() as room:
        half = Path(room) / "calibration.txt"
        half.write_text(text[: len(text) // 2])
        other = Path(room) / "rest.txt"
        other.write_text(text[len(text) // 2 :])
        for codec in ("w8a16.g128", "w8a16", "w8a8"):
            errors = {}
            for effort in ("default", "max"):
                out = Path(room) / f"{codec}-{effort}"
                calibration = str(half) if effort == "max" or codec == "w8a8" else None
                polyquant.quantize(
                    DEMO / "llama", out, to="msmodelslim", codec=codec, effort=effort, calibration=calibration
                )
                for label, file in (("calibration", half), ("other", other)):
                    found = compare_outputs(DEMO / "llama", out, file)
                    errors[effort, label] = float(np.mean([e.error for layer in found for e in layer.linears.values()]))
            for label in ("calibration", "other"):
                bar = 1.25 if codec == "w8a16.g128" and label == "calibration" else None
                yield Row(
                    f"{codec}: output error on {label} text, --effort max; peer plain rounding",
                    "relative",
                    errors["max", label],
                    errors["default", label],
                    bar,
                )


def _rows() -> Iterator[Row]:
    before = native.threads()
    try:
        for part in (_one_token, _many_tokens, _quantize, _against_the_tool, _effort):
            yield from part()
    finally:
        native.set_threads(before)


SECTION = Section("msModelSlim", _rows, peers=("torch",))
