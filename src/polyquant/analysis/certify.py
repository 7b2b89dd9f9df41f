"""Certify a conversion: prove that a checkpoint computes what its source does, without knowing how it was made.

    tensors      every tensor is found, and each block of each row is equal within the bound of its codec
    headers      the target's runtime reads the hyper-parameters of the source
    tokenizer    the same vocabulary, merges, special tokens, splitting and templates
    logits       if both models run, their outputs on a short text agree

Each difference is a finding with a code and its most likely cause. The certificate lists everything that was compared,
and the SHA-256 of all files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyquant.analysis.certification.headers import HeaderCheck, check_headers, shown
from polyquant.analysis.certification.logits import LogitCheck, check_logits
from polyquant.analysis.certification.tensors import TensorCheck, TensorResult, check_tensors
from polyquant.analysis.certification.tokens import check_tokenizer
from polyquant.architectures.language_model import language_model
from polyquant.codecs.tl import Tile
from polyquant.errors import PlanError, PolyquantError, printable
from polyquant.findings import Finding, Findings, Severity
from polyquant.formats.progress import shows_progress
from polyquant.formats.steps import Progress
from polyquant.opening import accepted, detect, open_checkpoint
from polyquant.storage.targets import refuse_missing_folder
from polyquant.tables import Row, Table
from polyquant.types import Checkpoint

if TYPE_CHECKING:
    from polyquant.analysis.integrity.files import FileDigest

__all__ = ["Certificate", "CertifiedFiles", "certify", "refuse_output"]

VERSION = 1
"""Version of the certificate's JSON; entries may be added within a version."""


@dataclass(frozen=True, slots=True)
class CertifiedFiles:
    """One side of a certificate: path, format, and the digest of each file (none without `digests`)."""

    path: str
    format: str
    files: Mapping[str, FileDigest]


@dataclass(frozen=True, slots=True, repr=False)
class Certificate:
    """The compared files and tensors, and the findings. certified: True if all findings are notes."""

    source: CertifiedFiles
    target: CertifiedFiles
    tensors: tuple[TensorResult, ...]
    headers: HeaderCheck
    tokenizer: str
    logits: LogitCheck
    findings: Findings = field(default_factory=Findings)

    @property
    def certified(self) -> bool:
        """True if the target computes what the source does, as far as was compared."""
        return not self.failures

    @property
    def failures(self) -> list[Finding]:
        """The findings that are not notes."""
        return [f for f in self.findings if f.severity is not Severity.NOTE]

    def __repr__(self) -> str:
        what = "certified" if self.certified else f"not certified, {len(self.failures)} findings"
        sides = f"{printable(self.target.path)} against {printable(self.source.path)}"
        return f"<Certificate {sides}: {what}; {self.summary}>"

    def _repr_html_(self) -> str:
        rows = ((t.name, list(t.shape), t.source, t.target, t.verdict, _shown(t.error)) for t in self.tensors)
        columns = ("tensor", "shape", "source", "target", "verdict", "error")
        below = [str(f) for f in self.findings]
        return Table(repr(self).strip("<>"), columns, rows, len(self.tensors), below).html()

    def rows(self) -> list[Row]:
        """One row per tensor: tensor, shape, source, target (codecs), verdict, rrmse; worst, bound: the largest and the
        allowed relative error of a unit.
        """
        return [
            {
                "tensor": t.name, "shape": t.shape, "source": t.source, "target": t.target, "verdict": t.verdict,
                "rrmse": t.error, "worst": t.worst, "bound": t.bound,
            }
            for t in self.tensors
        ]  # fmt: skip

    @property
    def summary(self) -> str:
        """The result in one line: parts joined by a semicolon."""
        counts: dict[str, int] = {}
        for t in self.tensors:
            counts[t.verdict] = counts.get(t.verdict, 0) + 1
        tensors = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
        headers = "headers not compared" if self.headers.problem else f"{len(self.headers.entries)} header entries"
        error = self.logits.error
        logits = "logits not compared" if error is None else f"logit error {error:.2g}"
        return "; ".join((f"{len(self.tensors)} tensors: {tensors}", headers, f"tokenizer: {self.tokenizer}", logits))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the certificate as JSON. Raises PlanError if another kind of file exists there."""
        from polyquant.storage.one_file import write_file  # only for certificates that are written

        refuse_output(path)
        text = json.dumps(_finite(self.to_json()), indent=2, allow_nan=False) + "\n"
        write_file(Path(path), text.encode(), overwrite=True)

    def to_json(self) -> dict[str, Any]:
        """The certificate as JSON-compatible types."""
        return {
            "certificate": VERSION,
            "polyquant": _version(),
            "certified": self.certified,
            "source": asdict(self.source),
            "target": asdict(self.target),
            "findings": [
                {"code": f.code, "severity": f.severity.value, "tensor": f.tensor, "message": f.message}
                for f in self.findings
            ],
            "tensors": [{**asdict(t), "shape": list(t.shape)} for t in self.tensors],
            "headers": [
                {"name": name, "expected": _plain(a), "found": _plain(b), "equal": not code}
                for name, a, b, code in self.headers.entries
            ],
            "tokenizer": self.tokenizer,
            "logits": asdict(self.logits),
        }


@shows_progress("certify")
def certify(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    logits: bool = True,
    digests: bool = True,
    ternary_layout: str | None = None,
    source_layout: str | None = None,
    tile: Tile | None = None,
    repair: bool = False,
    axes: str | None = None,
    progress: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Certificate:
    """Check that the checkpoint at `target` computes what the one at `source` does, and return the certificate.

    logits: also run both models on a short text; digests: also hash all files, half of the time. ternary_layout,
    source_layout: I2_S layouts of target and source; tile: (BM, BK, bm) of TL1 and TL2 in either; repair, axes: options
    of a Trellis folder as target. Raises InputError for a path that cannot be opened; everything else that differs is a
    finding.
    """
    tile_option = {"tile": tile}
    left = open_checkpoint(source, ternary_layout=source_layout, **accepted(detect(source)[0], tile_option))
    right = open_checkpoint(
        target, ternary_layout=ternary_layout, repair=repair, axes=axes, **accepted(detect(target)[0], tile_option)
    )
    a, b = language_model(left), language_model(right)
    with ThreadPoolExecutor(2) as pool:
        hashed = [pool.submit(_digests, side) for side in (left, right)] if digests else []
        check = _tensors(a, b, on_progress)
        headers = check_headers(a, b, as_gguf=check.translated)
        _header_findings(headers, check)
        rows = next((t.shape[0] for t in check.results.values() if t.name in _EMBEDDINGS and t.shape), None)
        differences, how = check_tokenizer(a, b, rows)
        for code, message in differences:
            check.add(code, message, None, Severity.NOTE if code == "CER062" else Severity.ERROR)
        digest_a, digest_b = [side.result() for side in hashed] or ({}, {})  # before the logits, which use all cores
        ran = LogitCheck(reason="not requested")
        if logits:
            ran = check_logits(a, b, check.typical_error)
        _logit_findings(ran, check, requested=logits)
    return Certificate(
        CertifiedFiles(str(left.path), left.format, digest_a),
        CertifiedFiles(str(right.path), right.format, digest_b),
        tuple(check.results.values()),
        headers,
        how,
        ran,
        check.findings,
    )


def _digests(side: Checkpoint) -> Mapping[str, FileDigest]:
    from polyquant.analysis.integrity.files import file_digests  # only for digests

    return file_digests(side)


_EMBEDDINGS = ("token_embd.weight", "model.embed_tokens.weight", "transformer.wte.weight")


def _tensors(a: Checkpoint, b: Checkpoint, on_progress: Callable[[Progress], None] | None) -> TensorCheck:
    try:
        return check_tensors(a, b, on_progress)
    except PolyquantError as problem:
        check = TensorCheck()
        name = None if problem.tensor is None else str(problem.tensor)
        code = "CER001" if "missing" in problem.message else "CER003"
        check.add(code, f"the tensors cannot be compared: {problem}", name)
        return check


def _header_findings(headers: HeaderCheck, check: TensorCheck) -> None:
    seen: set[str] = set()
    for name, expected, found, code in headers.differing:
        key = f"{code} {_rounded(expected)} {_rounded(found)}"  # a value under Hyper's name and under the file's key
        if key not in seen:
            seen.add(key)
            check.add(code, f"{printable(name)} is {shown(found)}, expected {shown(expected)}", None)
    for warning in headers.lost:
        check.add("CER062", warning, None, Severity.NOTE)
    if headers.problem:
        check.add("CER039", f"hyper-parameters were not compared: {headers.problem}", None)


def _logit_findings(ran: LogitCheck, check: TensorCheck, *, requested: bool) -> None:
    if ran.error is None:
        if requested:
            check.add("CER051", f"the logits were not compared: {ran.reason}", None, Severity.NOTE)
    elif not ran.sound:
        message = f"the relative error of the logits is {ran.error:.3g}, the bound is {ran.bound:.3g}"
        check.add("CER050", message, None)


def refuse_output(path: str | os.PathLike[str]) -> None:
    """Raise PlanError if something other than a certificate exists at `path`, or its folder does not."""
    where = Path(path)
    refuse_missing_folder(where)
    if where.is_dir():
        raise PlanError("is a folder, not a file to write", file=where)
    if where.exists():
        with where.open("rb") as f:
            if not f.read(64).lstrip(b"{\n\r\t ").startswith(b'"certificate"'):
                raise PlanError("exists and is not a certificate", file=where, hint="choose another name")


def _finite(value: Any) -> Any:
    """Infinities and NaN as null, which strict JSON requires."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rounded(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else shown(value)


def _version() -> str:
    from polyquant import __version__

    return __version__


def _shown(error: float | None) -> str:
    return "" if error is None else "0" if error == 0 else f"{error:.2e}"


def _plain(value: Any) -> Any:
    """A header's value as JSON; long lists are cut."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value[:64]]
    return str(value)
