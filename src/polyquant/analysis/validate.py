"""Validate a checkpoint: structure, then each codec's rules on every tensor, then with `against` the errors.

Findings have stable codes: GGUF..., HF..., TRL..., ASC... from the formats, HUB... about programs that read the model,
TEN... about tensor values, SUM... about checksums, CMP... from a comparison.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from polyquant.analysis import consumers
from polyquant.analysis.compare import compare_checkpoints
from polyquant.analysis.headers import without_data
from polyquant.analysis.integrity.check import checksum_findings, read_recorded
from polyquant.analysis.model_check import model_findings
from polyquant.capabilities import CountsSymbols, DecodesRows, Opaque, Tiled
from polyquant.codecs.ternary import likely_zero_symbol
from polyquant.codecs.tl import Tile
from polyquant.errors import InputError, PlanError, PolyquantError, UnknownNameError, UnsupportedError
from polyquant.formats.progress import shows_progress
from polyquant.formats.protocol import ChecksConsumers
from polyquant.formats.steps import Progress
from polyquant.opening import ChecksHeaders, detect, open_as, open_checkpoint
from polyquant.registry import formats
from polyquant.storage.locations import located
from polyquant.storage.parsed import parsed_once
from polyquant.types import Checkpoint, Finding, Findings, Severity, Weight, as_matrix

if TYPE_CHECKING:
    from polyquant.formats.protocol import Format

__all__ = ["CODES", "MIN_SNR", "targets", "validate"]

MIN_SNR = 3.0
"""dB. Even two-bit codecs exceed 8; a wrong layout or permutation gives about 0 or less."""

CODES = {
    "TEN001": "A weight decodes to NaN or infinity: a broken scale, or a model that diverged in training. One such "
    "value spreads to every "
    "later token. Find the tensor's origin again; if the source has it too, the model itself is broken.",
    "TEN002": "A ternary tensor contains the symbol 3, which no packer writes. bitnet.cpp reads it as 0, ik_llama.cpp "
    "as +2. Usually a tensor in "
    "a different layout, or unrelated bytes. Compare with the source model, or try another --ternary-layout.",
    "TEN003": "The symbol frequencies show that this tensor uses a different symbol order than the one it was opened "
    "with: -1 and "
    "+1 are about equally frequent in real models, so the symbol with a different frequency is zero (1 in "
    "bitnet.cpp's I2_S, 0 in Trinity's). "
    "Open it with --ternary-layout trinity.i2_s, or i2_s.x86.",
    "TEN004": "Every weight of a matrix is zero. Pruned on purpose, or lost in a conversion; compare with the source.",
    "TEN006": "This tensor's type, or a parameter of its layout (the tile of TL1 and TL2), is not known, so its "
    "values could "
    "not be checked. It can be copied, not decoded.",
    "TEN007": "The stored parts of this tensor break the rules of its codec (a scale, a sign, a code or a size that "
    "its packer never writes), so it cannot be decoded: damaged, or another layout. Copy the file again, or convert "
    "it again from its source.",
    "MOD001": "The metadata declares more layers than the file has tensors for. A runtime stops at the first missing "
    "one, or worse, "
    "continues with uninitialized memory. Usually an interrupted conversion, or one file of a split model under "
    "another "
    "name.",
    "CMP001": "A tensor of the reference is missing here.",
    "CMP002": f"The error against the reference is larger than any correct quantization causes (SNR below {MIN_SNR:g} "
    "dB): a wrong layout, a wrong "
    "row permutation of q and k, a swapped scale convention, or another model altogether.",
    "CMP003": "The checkpoint has a tensor that is not in the reference.",
}


@shows_progress("validate")
def validate(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    ternary_layout: str | None = None,
    tile: Tile | None = None,
    target: str | None = None,
    tp: int | None = None,
    checksums: str | os.PathLike[str] | None = None,
    headers: bool = False,
    progress: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Findings:
    """All findings about the checkpoint at `path`. An empty list means that it is valid.

    headers: check headers and small files only; the data of tensors is not read, and checksums are not compared.

    target: also report what this program (`targets()`: "vllm", "transformers", "llama.cpp", ...) rejects or computes
    wrongly. tp: the number of GPUs among which that program divides each layer. checksums: a file of `polyquant
    checksum` or a list of SHA-256 lines; by default those next to the model. Raises InputError only if the path is not
    a checkpoint; a broken one gives findings of severity error. Raises UnsupportedError or UnknownNameError for a
    target that cannot be checked, PlanError for options that do not go together.
    """
    if tp is not None and (target is None or tp < 1):
        raise PlanError(f"{tp} GPUs without a target" if target is None else f"{tp} GPUs", hint="add --target vllm")
    if headers:
        return _of_headers(path, against, checksums, target, tp, ternary_layout=ternary_layout, tile=tile)
    form, _ = detect(path)
    recorded = read_recorded(located(path), None if checksums is None else located(checksums))
    findings = _with_consumer(form, path, form.check(located(path)), target, tp)
    try:
        checkpoint = open_as(form, path, {"ternary_layout": ternary_layout, "tile": tile})
    except InputError:
        if not any(f.severity is Severity.ERROR for f in findings):
            raise
        findings += checksum_findings(located(path), None, recorded, on_progress=on_progress)
        return findings
    findings += _declared_layers(checkpoint)
    if checkpoint.undecoded is None:
        findings += model_findings(checkpoint)
    total = max(1, sum(w.nbytes for w in checkpoint.values()))
    done = 0
    for weight in checkpoint.values():
        findings += _tensor_findings(weight)
        done += weight.nbytes
        if on_progress is not None:
            on_progress(Progress(done, total, weight.name, 0.0))
    findings += checksum_findings(located(path), checkpoint, recorded, on_progress=on_progress)
    if against is not None and checkpoint.undecoded is None:
        findings += _compared(open_checkpoint(against), checkpoint)
    return findings


def targets() -> tuple[str, ...]:
    """Names of the programs for which models can be checked."""
    own = (name for form in formats() if isinstance(form, ChecksConsumers) for name in form.consumers)
    return tuple(dict.fromkeys((*consumers.NAMES, *own)))


def _with_consumer(
    form: Format, path: str | os.PathLike[str], found: Iterable[Finding], target: str | None, tp: int | None
) -> Findings:
    """The findings of a format and of the target. A file that cannot be read is an error of the format."""
    if target is None:
        return Findings(found)
    chosen = _consumer(form, path, target, tp)
    findings = Findings(found)
    try:
        findings += chosen
    except InputError:
        if not any(f.severity is Severity.ERROR for f in findings):
            raise
    return findings


def _consumer(form: Format, path: str | os.PathLike[str], target: str, tp: int | None) -> Iterable[Finding]:
    """The findings of a program. Raises UnknownNameError, UnsupportedError for one that reads other formats."""
    if target not in targets():
        raise UnknownNameError("target", target, targets())
    if isinstance(form, ChecksConsumers) and target in form.consumers:
        if tp is not None:
            raise PlanError(f"the checks of {form.title} do not depend on the number of devices", hint="leave out --tp")
        return form.check_consumer(located(path), target)
    if target not in consumers.NAMES:
        having = " and ".join(f.title for f in formats() if isinstance(f, ChecksConsumers) and target in f.consumers)
        raise UnsupportedError(f"--target {target} applies to {having} only", file=path, found=form.name)
    return consumers.consumer_findings(located(path), target, tp or 1)


def _of_headers(
    path: str | os.PathLike[str],
    against: object,
    checksums: object,
    target: str | None,
    tp: int | None,
    **options: Any,
) -> Findings:
    """The findings from headers and small files."""
    if against is not None or checksums is not None:
        raise PlanError("headers only: data is neither compared nor checked against checksums", file=path)
    with parsed_once():
        form, _ = detect(path)
        check = form.check_headers if isinstance(form, ChecksHeaders) else form.check
        findings = _with_consumer(form, path, check(located(path)), target, tp)
        try:
            checkpoint = open_as(form, path, options)
        except InputError:
            if not any(f.severity is Severity.ERROR for f in findings):
                raise
            return findings
        findings += _declared_layers(checkpoint)
        if checkpoint.undecoded is None:
            findings += model_findings(without_data(checkpoint))
        return findings


def _declared_layers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Compare the number of layers in metadata or config with the layers that have tensors."""
    architecture = checkpoint.metadata.get("general.architecture", "")
    stated = checkpoint.metadata.get(f"{architecture}.block_count") or checkpoint.config.get("num_hidden_layers")
    numbers = {int(n[1]) for name in checkpoint if (n := re.search(r"(?:^blk|layers)\.(\d{1,9})\.", name))}
    if isinstance(stated, int) and numbers and (missing := stated - len([i for i in numbers if i < stated])) > 0:
        yield Finding("MOD001", Severity.ERROR, f"{stated:,} layers are declared, {missing:,} of them have no tensors")


def _tensor_findings(weight: Weight) -> Iterator[Finding]:
    """Check for finite values, valid symbols, and a plausible symbol order."""
    name = weight.name
    if isinstance(weight.codec, Opaque):
        if weight.codec.finding is not None:
            yield Finding("TEN006", Severity.WARNING, weight.codec.finding, name)
        return
    if isinstance(weight.codec, CountsSymbols):
        yield from _symbols(weight, weight.codec)
    rows, k = as_matrix(weight.shape)
    codec, parts = weight.codec, None
    by_rows = codec.row_sliced or (isinstance(codec, DecodesRows) and codec.decodes_rows)
    step = max(1, (1 << 20) // max(1, k)) if by_rows else max(1, rows)
    bad, largest = 0, 0.0
    try:
        for a in range(0, rows, step):
            part = slice(a, min(rows, a + step))
            parts = parts if parts is not None or codec.row_sliced else weight.read()
            with np.errstate(invalid="ignore", over="ignore"):
                if parts is None:
                    w = codec.dequantize(weight.read(part), (part.stop - a, k))
                else:
                    w = codec.dequantize(parts, weight.shape, rows=part if by_rows else None)
                block = float(np.abs(w).max(initial=0))
            if not np.isfinite(block):
                bad += int((~np.isfinite(w)).sum())
            largest = max(largest, block)
    except PolyquantError as problem:
        hint = f"; {problem.hint}" if problem.hint else ""
        if isinstance(problem, UnsupportedError) or (isinstance(codec, Tiled) and codec.tile is None):
            yield Finding("TEN006", Severity.WARNING, problem.message + hint, name)
        else:
            shown = type(problem)(problem.message, expected=problem.expected, found=problem.found)
            yield Finding("TEN007", Severity.ERROR, f"{shown}{hint}", name)
        return
    if bad:
        yield Finding("TEN001", Severity.ERROR, f"{bad:,} of {rows * k:,} weights are NaN or infinite", name)
    elif largest == 0 and rows > 1 and k > 1:
        yield Finding("TEN004", Severity.WARNING, "every weight is zero", name)


def _symbols(weight: Weight, codec: CountsSymbols) -> Iterator[Finding]:
    counts = codec.symbol_histogram(weight.read(), weight.shape)
    if counts[3]:
        yield Finding("TEN002", Severity.ERROR, f"{int(counts[3]):,} symbols are 3, which is not defined", weight.name)
    zero = likely_zero_symbol(counts)
    if zero is not None and zero != codec.zero_symbol:
        yield Finding(
            "TEN003",
            Severity.ERROR,
            f"symbol {zero} looks like zero, {codec} has it as {codec.zero_symbol}",
            weight.name,
        )


def _compared(reference: Checkpoint, checkpoint: Checkpoint) -> Iterator[Finding]:
    try:
        comparison = compare_checkpoints(reference, checkpoint)
    except PlanError as problem:
        yield Finding("CMP002", Severity.ERROR, str(problem))
        return
    for name in comparison.only_a:
        yield Finding("CMP001", Severity.ERROR, "missing; it is in the reference", name)
    for name in comparison.only_b:
        yield Finding("CMP003", Severity.NOTE, "not in the reference", name)
    for t in comparison.tensors:
        if t.error.snr < MIN_SNR:
            layout = "; another --ternary-layout?" if "i2_s" in t.b else ""
            figures = f"SNR {t.error.snr:.1f} dB, cosine {t.error.cosine:.3f}"
            yield Finding("CMP002", Severity.ERROR, f"{figures} ({t.a} against {t.b}){layout}", t.name)
