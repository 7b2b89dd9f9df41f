"""Detect a format and open it. Built-in formats and those of installed packages are treated the same way."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack, runtime_checkable

from polyquant.errors import InputError, PolyquantError, UnsupportedError, listed
from polyquant.keywords import OPEN_DEFAULTS, OpenKeywords
from polyquant.no_collection import no_collection
from polyquant.options import build, given, options_of, refuse_unknown, with_keywords
from polyquant.registry import FORMATS, PluginWarning, Search, formats
from polyquant.storage.locations import is_folder, located
from polyquant.storage.parsed import parsed_once
from polyquant.storage.phases import phase
from polyquant.storage.source import Source, opened_files
from polyquant.types import Checkpoint, Evidence, Finding, Severity

if TYPE_CHECKING:
    from polyquant.formats.protocol import Format

__all__ = ["ChecksHeaders", "accepted", "detect", "look", "open_as", "open_checkpoint", "open_sound", "refuse_invalid"]


@runtime_checkable
class ChecksHeaders(Protocol):
    """A format whose `check` has a part that is cheap enough to run before every conversion and every load."""

    def check_headers(self, path: Path) -> Iterable[Finding]:
        """The findings of `check` that need only headers and small files."""


def detect(path: str | os.PathLike[str]) -> tuple[Format, Evidence]:
    """Detect the format. Raises InputError for a missing path or an unknown format; does not rely on the extension
    alone.

    A format of an installed package whose `sniff` raises is skipped: a PluginWarning names it, and so does the error if
    no other format matches.
    """
    where = located(path)
    folder = is_folder(where)  # False for an invalid name, which opening reports
    head = b"" if folder else _first_bytes(where)
    failed: dict[str, Exception] = {}
    for form in formats():
        if (evidence := _sniffed(form, where, failed)) is not None:
            for name, problem in failed.items():
                warnings.warn(f"{_failure(name, problem)}; it was skipped", PluginWarning, stacklevel=2)
            return form, evidence
    if head in (b"3IRT", b"TRI3"):
        raise UnsupportedError("a Trinity .tri file", file=where, hint="export it as GGUF with Trinity, then open that")
    if not folder:
        raise InputError(
            "not a format that polyquant knows",
            file=where,
            found=f"first bytes {head!r}" if head else "an empty file",
            hint=f"expected GGUF, safetensors or a Hugging Face folder{_installed()}{_failures(failed)}",
        )
    if files := sorted(p.name for p in where.iterdir() if p.suffix == ".gguf"):
        raise InputError(
            "a folder of GGUF files, each of which is a model", file=where, found=f"{len(files)} of them",
            hint=f"name one, e.g. {where / files[0]}",
        )  # fmt: skip
    raise InputError(
        "no weights in this folder",
        file=where,
        hint=f"expected *.safetensors, pytorch_model.bin or an index of shards{_installed()}{_failures(failed)}",
    )


def _sniffed(form: Format, path: Path, failed: dict[str, Exception]) -> Evidence | None:
    """Call `sniff`. If a format of another package raises, record it in `failed` and return None."""
    if form.name in FORMATS:
        return form.sniff(path)
    try:
        evidence = form.sniff(path)
        if evidence is not None and not isinstance(evidence, Evidence):
            raise TypeError(f"sniff must return Evidence or None, not {type(evidence).__name__}")
    except Exception as problem:  # noqa: BLE001 - a plugin may raise anything
        failed[form.name] = problem
        return None
    return evidence


def _failure(name: str, problem: Exception) -> str:
    text = str(problem) if isinstance(problem, PolyquantError) else f"{type(problem).__name__}: {problem}"
    return f"the plugin '{name}' failed to inspect it: {text}"


def _failures(failed: Mapping[str, Exception]) -> str:
    """Failures of installed packages, as the end of a message."""
    return "".join(f"; {_failure(name, problem)}" for name, problem in failed.items())


def _installed() -> str:
    """Formats of installed packages, as the end of a message."""
    titles = [f.title for f in formats() if f.name not in FORMATS]
    return f"; or of an installed package: {listed(titles)}" if titles else ""


def _first_bytes(path: Path) -> bytes:
    """The first 4 bytes, or fewer. Raises InputError for a missing file, a pipe or a device."""
    source = Source(path)
    head = source.pread(0, min(4, source.size)).tobytes()
    source.close()
    return head


@with_keywords(OpenKeywords, OPEN_DEFAULTS)
def open_checkpoint(path: str | os.PathLike[str], **options: Unpack[OpenKeywords]) -> Checkpoint:
    """Like `look`, for a checkpoint whose weights are used. Raises UnsupportedError for an unsupported quantization
    scheme.
    """
    checkpoint = look(path, **options)
    if checkpoint.undecoded is not None:
        raise checkpoint.undecoded.error()
    return checkpoint


@with_keywords(OpenKeywords, OPEN_DEFAULTS)
def look(path: str | os.PathLike[str], **options: Unpack[OpenKeywords]) -> Checkpoint:
    """Open a file or folder of any format as a mapping from tensor name to Weight. Reads headers only.

    Weights of an unsupported quantization scheme open in their stored layout; their `dequantize` raises
    UnsupportedError. options: properties that the bytes do not show. GGUF: ternary_layout ("i2_s.x86", "i2_s.arm",
    "i2_s.x4", "trinity.i2_s"), dialect, tile (BM, BK, bm of TL1 and TL2 tensors). Trellis: repair (undo the bugs of
    Metal Marlin's quantizer), axes ("kn" or "nk"). Raises InputError for broken input, UnsupportedError for an option
    of another format.
    """
    form, _ = detect(path)
    return open_as(form, path, options)


def open_as(form: Format, path: str | os.PathLike[str], options: Mapping[str, Any]) -> Checkpoint:
    """Open a path in a known format. Raises as `look`."""
    own = options_of(form.open_options)
    for name in given(options):
        if name not in own:
            having = [f.title for f in formats() if name in options_of(f.open_options)]
            refuse_unknown([name], {n for f in formats() for n in options_of(f.open_options)}, "open")
            raise UnsupportedError(f"{name} applies to {' and '.join(having)} only", file=path)
    with no_collection(), opened_files() as opened:
        checkpoint = form.open(located(path), build(form.open_options, options))
        return replace(checkpoint, opened=opened, other_name=Search("polyquant.architectures.find:other_name"))


def open_sound(form: Format, path: str | os.PathLike[str], options: Mapping[str, Any]) -> Checkpoint:
    """Open a path in a known format for use. Raises as `open_checkpoint`, and InputError for the first error that
    `validate` finds in headers and small files.
    """
    with parsed_once():
        checkpoint = open_as(form, path, options)
        if checkpoint.undecoded is not None:
            raise checkpoint.undecoded.error()
        refuse_invalid(form, path)
        return checkpoint


def refuse_invalid(form: Format, path: str | os.PathLike[str]) -> None:
    """Raise InputError for the first error that `validate` finds in headers and small files."""
    if not isinstance(form, ChecksHeaders):
        return
    with phase("check"):
        errors = [f for f in form.check_headers(located(path)) if f.severity is Severity.ERROR]
    if errors:
        first, more = errors[0], f" ({len(errors)} errors)" if len(errors) > 1 else ""
        raise InputError(
            first.message,
            file=located(path) / first.file if first.file and is_folder(path) else path,
            tensor=first.tensor,
            hint=f"finding {first.code}{more}, see `polyquant validate`",
        )


def accepted(form: Format, options: dict[str, Any]) -> dict[str, Any]:
    """The options that this format can be opened with."""
    own = options_of(form.open_options)
    return {name: value for name, value in options.items() if name in own}
