"""A planned conversion: its steps and its size in bytes, bits and memory."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polyquant.calibration.samples import OWN_TEXT
from polyquant.conversion.memory import program_bytes, working_bytes
from polyquant.errors import printable
from polyquant.formats.protocol import Target
from polyquant.formats.steps import Step
from polyquant.recipes.recipe import Recipe
from polyquant.runtime.text import read_text
from polyquant.storage.file_state import FileState
from polyquant.storage.locations import is_remote
from polyquant.storage.source import state_of
from polyquant.tables import Row, Table, size, tensor_columns
from polyquant.types import (
    F32,
    Action,
    Checkpoint,
    Floats,
    Layout,
    Translation,
)

__all__ = ["Plan", "with_name"]


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """A conversion, ready to run.

    options: an instance of the target's option class. method: how codes are searched. text: the calibration text, a
    file or OWN_TEXT. request: the arguments of `plan`, to make it again in another process; measured: results of
    measurements on the model, for the same purpose.
    """

    source: Checkpoint
    format: str
    target: Target
    options: Any
    recipe: Recipe
    translation: Translation
    steps: tuple[Step, ...]
    layout: Layout
    warnings: tuple[str, ...] = ()
    importance: Mapping[str, F32] = field(default_factory=dict)
    method: str | None = None
    text: str | None = None
    request: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)
    _shares: dict[int, Any] = field(default_factory=dict, compare=False)  # count -> steps, conversion.tasks.shares

    def __repr__(self) -> str:
        actions = ", ".join(f"{action.value} {count}" for action, count in self.actions.items())
        warned = f"; {len(self.warnings)} warning{'' if len(self.warnings) == 1 else 's'}" if self.warnings else ""
        where = f"{printable(self.source.path)} -> {self.format}"
        figures = f"{len(self.steps)} tensors, {size(self.nbytes)}, {self.bpw:.3f} bits per weight"
        return f"<Plan {where}: {figures}; {actions}{warned}>"

    def _repr_html_(self) -> str:
        rows = (
            (s.map.target, list(s.map.shape), s.action.value, s.source or "", s.target, s.why, size(s.nbytes))
            for s in self.steps
        )
        columns = ("tensor", "shape", "action", "from", "to", "why", "size")
        return Table(repr(self).strip("<>"), columns, rows, len(self.steps), self.warnings).html()

    def rows(self) -> list[Row]:
        """One row per target tensor: tensor, shape, weights, bytes, bpw, action, source, target (codecs), why."""
        return [
            {
                **tensor_columns(s.map.target, s.map.shape, s.nbytes), "action": s.action.value,
                "source": None if s.source is None else str(s.source), "target": str(s.target), "why": s.why,
            }
            for s in self.steps
        ]  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Exact size of the output: every file, headers and padding counted."""
        return self.layout.nbytes

    @property
    def bpw(self) -> float:
        """Effective bits per weight of the output's tensors."""
        return 8 * sum(s.nbytes for s in self.steps) / max(1, sum(s.weights for s in self.steps))

    @property
    def quantized_bpw(self) -> float:
        """Effective bits per weight of the quantized tensors, every part counted; 0 if there are none."""
        quantized = [s for s in self.steps if s.target.form is not Floats]
        return 8 * sum(s.nbytes for s in quantized) / max(1, sum(s.weights for s in quantized))

    @property
    def working_memory(self) -> int:
        """Upper estimate of the working memory of two threads, in bytes, without interpreter and libraries."""
        return working_bytes(self.steps, calibrated=self.text is not None)

    @property
    def peak_memory(self) -> int:
        """Upper estimate of the peak resident memory of this process with two threads, in bytes."""
        return program_bytes() + self.working_memory

    @property
    def actions(self) -> Counter[Action]:
        """Number of tensors per action."""
        return Counter(s.action for s in self.steps)

    @property
    def fingerprint(self) -> str:
        """A hash of source files and `identity`. Only a journal with the same hash is resumed."""
        h = hashlib.sha256()
        for path, state in self.source_files.items():
            h.update(os.fsencode(path.name) + f" {state[1:]}\n".encode())
        h.update(self.identity.encode())
        return h.hexdigest()

    @property
    def source_files(self) -> dict[Path, FileState]:
        """The files of the source, sorted, and their states; none for arrays in memory."""
        root = self.source.path
        read = [] if self.source.in_memory else _files(root) if root.is_dir() else [root]
        states = {path.absolute(): state_of(path.stat()) for path in read}
        states |= {path: FileState(*state) for path, state in self.source.opened.items()}
        return dict(sorted(states.items()))

    @property
    def identity(self) -> str:
        """A hash of everything except weights that determines the output; equal on every machine."""
        h = hashlib.sha256()
        for s in self.steps:
            h.update(f"{s.map.sources} {s.map.target} {s.map.shape} {s.action} {s.source} {s.target} ".encode())
            h.update(s.map.op.identity)
        for f in self.layout.files:
            h.update(os.fsencode(f"{f.name} {f.size}\n"))
            for offset, data in f.pieces:
                h.update(f"{offset} ".encode() + data)
        for name, values in sorted(self.importance.items()):
            h.update(name.encode() + values.tobytes())
        h.update(repr(self.options).encode())
        if (text := self.text) is not None:
            h.update(b"" if text == OWN_TEXT else read_text(text).encode())
        return h.hexdigest()


def _files(root: Path) -> list[Path]:
    """Files of a folder and of its layer folders (Trellis v2), without dangling links and unreadable folders."""

    def inside(folder: Path) -> list[Path]:
        readable = is_remote(folder) or os.access(folder, os.R_OK | os.X_OK)
        return sorted(p for p in folder.iterdir() if p.exists()) if readable else []

    return [p for top in inside(root) for p in ([top, *inside(top)] if top.is_dir() else [top])]


_MEMBER = re.compile(r".*?(?=-\d{5}-of-\d{5}\.)")
"""The name of a split file before its number."""


def with_name(plan: Plan, path: Path) -> Plan:
    """The same plan with the target's file name, or the names NAME-00001-of-0000N.gguf of a split model."""
    if plan.layout.folder:
        return plan
    new, single = path.name.removesuffix(plan.target.suffix), len(plan.layout.files) == 1
    names = {f.name: path.name if single else new + _MEMBER.sub("", f.name, count=1) for f in plan.layout.files}
    slots = {key: replace(slot, file=names[slot.file]) for key, slot in plan.layout.slots.items()}
    files = tuple(replace(f, name=names[f.name]) for f in plan.layout.files)
    return replace(plan, layout=Layout(files, slots, False))
