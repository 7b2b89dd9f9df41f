"""The model card of an upload, Markdown with YAML metadata: format, codecs, recipe, errors, files, commands.

Text from the model's files and from the report is untrusted: it is escaped, and only plain words become tags.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyquant.analysis.inspect import architecture_of
from polyquant.conversion.report import StepReport, errors_of
from polyquant.errors import InputError, printable
from polyquant.formats.protocol import Format, NamesReaders
from polyquant.storage import strict_json
from polyquant.tables import decibel, size
from polyquant.types import Checkpoint

__all__ = ["Uploaded", "model_card", "read_report"]

_TAG = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_BASE = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Uploaded:
    """One model of an upload: its format, its name inside the repository ("" for the repository itself), its bytes."""

    format: Format
    checkpoint: Checkpoint
    name: str
    nbytes: int


def read_report(path: Path) -> tuple[str, list[StepReport]]:
    """Return recipe and steps of a report (`convert --format json`). Raises InputError."""
    content = strict_json.typed(strict_json.read(path, strict_json.INDEX), dict, "the report", file=path)
    try:
        steps = [StepReport.from_json(entry) for entry in content["tensors"]]
        return str(content.get("recipe", "")), steps
    except (KeyError, TypeError, ValueError, AttributeError):
        hint = "write one with `polyquant convert ... --format json > report.json`"
        raise InputError("is not a report of a conversion", file=path, hint=hint) from None


def model_card(
    repo: str,
    models: Sequence[Uploaded],
    files: Mapping[str, int],
    *,
    base_model: str | None = None,
    report: tuple[str, Sequence[StepReport]] | None = None,
) -> str:
    """Return README.md for a repository. files: name -> bytes. Raises InputError for an invalid base model."""
    from polyquant import __version__

    if base_model is not None and not _BASE.fullmatch(base_model):
        raise InputError("--base-model is not the name of a repository", expected="org/name", found=base_model)
    codecs = list(dict.fromkeys(str(w.codec) for m in models for w in m.checkpoint.values()))
    tags = ["polyquant", *(m.format.name for m in models), *codecs]
    lines = ["---", *([f"base_model: {base_model}"] if base_model else []), "tags:"]
    lines += [f"- {tag}" for tag in dict.fromkeys(t for t in tags if _TAG.fullmatch(t))]
    lines += ["---", "", f"# {_cell(repo.rpartition('/')[2])}", ""]
    made = f"Made with polyquant {__version__}"
    lines += [f"{made} from [{base_model}](../{base_model})." if base_model else f"{made}.", ""]
    for model in models:
        lines += _contents(model)
    if report is not None:
        lines += _errors(*report)
    lines += ["## Load", "", "```sh", *_commands(repo, models), "```", "", "## Files", ""]
    lines += _table(("file", "size"), ((f"`{_cell(name)}`", size(n)) for name, n in sorted(files.items())))
    return "\n".join(lines) + "\n"


def _contents(model: Uploaded) -> list[str]:
    """The format, the architecture and the codecs of one model."""
    weights: dict[str, list[int]] = {}
    for w in model.checkpoint.values():
        sums = weights.setdefault(str(w.codec), [0, 0, 0])
        for i, n in enumerate((1, math.prod(w.shape), w.nbytes)):
            sums[i] += n
    architecture = architecture_of(model.checkpoint)
    total = sum(n for _, n, _ in weights.values())
    facts = [model.format.title, *([_cell(architecture)] if architecture else []), f"{total:,} weights"]
    facts += [size(model.nbytes), f"{model.checkpoint.bpw:.3f} bits per weight"]
    rows = (
        (f"`{_cell(codec)}`", f"{tensors:,}", f"{count / max(1, total):.1%}", f"{8 * nbytes / max(1, count):.3f}")
        for codec, (tensors, count, nbytes) in sorted(weights.items(), key=lambda item: -item[1][1])
    )
    head = [f"## {_cell(model.name)}" if model.name else "## Format", "", ", ".join(facts) + ".", ""]
    return head + _table(("codec", "tensors", "share of weights", "bits per weight"), rows)


def _errors(recipe: str, steps: Sequence[StepReport]) -> list[str]:
    """The recipe, and the measured error for each change of codec."""
    groups: dict[tuple[str, str, str], list[StepReport]] = {}
    for step in steps:
        groups.setdefault((step.action, step.source, step.target), []).append(step)
    rows = []
    for (action, source, target), members in groups.items():
        e = errors_of(members)
        figures = (decibel(e["snr_db"]), f"{e['rrmse']:.5f}") if e else ("", "")
        rows.append((_cell(action), f"`{_cell(source)}`", f"`{_cell(target)}`", f"{len(members):,}", *figures))
    head = ["## Errors", "", *([f"Recipe: {_cell(recipe)}.", ""] if recipe else [])]
    return head + _table(("action", "from", "to", "tensors", "SNR dB", "relative RMSE"), rows)


def _commands(repo: str, models: Sequence[Uploaded]) -> list[str]:
    """Commands that load the models, with a comment for each program."""
    lines = []
    for model in models:
        where = f"hf://{repo}/{model.name}" if model.name else f"hf://{repo}"
        lines += ["# polyquant", f"polyquant run {_cell(where)}"]
        readers = model.format.readers if isinstance(model.format, NamesReaders) else {}
        for program, command in readers.items():
            lines += [f"# {program}", command.format(repo=repo, file=_cell(model.name))]
    return lines


def _table(columns: Sequence[str], rows: Any) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _cell(text: str) -> str:
    """Text from a file without the characters that mean something in Markdown or a shell."""
    return re.sub(r"[|`<>\[\]\\*$;&\"'()]", "_", printable(text, 120))
