"""Demonstration on two embedded models: inspect, convert to several formats, validate and compare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from polyquant.analysis.compare import compare
from polyquant.analysis.validate import validate
from polyquant.conversion.convert import convert
from polyquant.ops.metrics import ErrorSums
from polyquant.types import Severity

__all__ = ["LADDER", "Outcome", "demo", "demo_model"]

LADDER = (
    ("llama", "bf16"),
    ("llama", "q8_0"),
    ("llama", "q6_k"),
    ("llama", "q5_k_m"),
    ("llama", "q4_k_m"),
    ("llama", "q4_0"),
    ("llama", "q3_k_m"),
    ("llama", "q2_k"),
    ("bitnet", "i2_s"),
    ("bitnet", "tq2_0"),
    ("bitnet", "tq1_0"),
)
"""(model, recipe) of the demonstration, from large to small."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One converted file: size, bits per weight, error against its source, share of equal ternary codes, findings."""

    model: str
    recipe: str
    path: Path
    nbytes: int
    bpw: float
    error: ErrorSums
    equal_codes: float | None
    findings: int
    seconds: float


def demo_model(name: str) -> Path:
    """Folder of an embedded model: "llama" or "bitnet"."""
    with as_file(files("polyquant") / "demo" / name) as folder:
        return folder


def demo(out: Path) -> Iterator[Outcome]:
    """Convert the embedded models into `out` and yield one outcome per file; existing files of these names are
    replaced.
    """
    out.mkdir(parents=True, exist_ok=True)
    for model, recipe in LADDER:
        source = demo_model(model)
        path = out / f"demo-{model}-{recipe}.gguf"
        report = convert(source, path, recipe=recipe, overwrite=True)
        findings = [f for f in validate(path, against=source) if f.severity is not Severity.NOTE]
        comparison = compare(source, path)
        shares = [
            t.equal_codes for t in comparison.tensors if t.equal_codes is not None and t.b not in ("f32", "bf16", "f16")
        ]
        equal = sum(shares) / len(shares) if shares else None
        yield Outcome(
            model,
            recipe,
            path,
            path.stat().st_size,
            comparison.bpw,
            comparison.error,
            equal,
            len(findings),
            report.seconds,
        )
