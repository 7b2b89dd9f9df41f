"""A conversion that is decided: its steps, and what they amount to in bytes, bits and memory."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from polyquant.calibration.stages import OWN_TEXT, TOKENS, WINDOWS
from polyquant.capabilities import Tiled
from polyquant.formats.msmodelslim.options import MsModelSlimOptions
from polyquant.formats.steps import Step
from polyquant.recipes.recipe import Recipe
from polyquant.runtime.text import read_text
from polyquant.storage.source import state_of
from polyquant.types import (
    F32,
    Action,
    Affine,
    Checkpoint,
    Floats,
    Layout,
    Ternary,
    Translation,
    as_matrix,
)

__all__ = ["DEFAULT_NAME", "MSMODELSLIM", "TRELLIS", "Plan", "with_name"]

TRELLIS = "trellis-v3"
MSMODELSLIM = "msmodelslim"

DEFAULT_NAME = "model.gguf"
"""Of a plan that does not know its target yet."""

TRELLIS_BYTES = 36
"""Working memory of a search for trellis codes or of their decoding, per weight of the one tensor that is in work."""

HESSIAN_BYTES = 44
"""Working memory for each of the K x K numbers of a Hessian: as collected for the inputs of a layer, rotated, and its factor in float64."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A conversion, ready to run. method: how the codes of a Trellis target are searched; calibration: with the inputs that this text gives.

    ascend: of an msModelSlim target, with its own calibration.
    """

    source: Checkpoint
    format: str
    recipe: Recipe
    translation: Translation
    steps: tuple[Step, ...]
    layout: Layout
    warnings: tuple[str, ...] = ()
    importance: Mapping[str, F32] = field(default_factory=dict)
    method: str | None = None
    calibration: str | None = None
    ascend: MsModelSlimOptions | None = None

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
        """Effective bits per weight of the tensors that are not floats, every part counted; 0 if there are none."""
        quantized = [s for s in self.steps if s.target.form is not Floats]
        return 8 * sum(s.nbytes for s in quantized) / max(1, sum(s.weights for s in quantized))

    @property
    def peak_memory(self) -> int:
        """Upper estimate of working memory for two threads, in bytes, without interpreter and libraries."""
        text = self.text

        def need(step: Step) -> int:
            rows, k = as_matrix(step.map.shape)
            if step.streams:
                return 2 * min(rows, step.block_rows) * k * 16
            if step.alone and step.action not in (Action.COPY, Action.TRANSCODE):
                return rows * k * TRELLIS_BYTES + (k * k * HESSIAN_BYTES if text is not None else 0)
            return rows * k * (3 if step.target.form is Ternary else 10)

        learning = [s for s in self.steps if s.searches or s.target.form is Affine]
        inputs = [as_matrix(s.map.shape)[1] for s in learning] if text is not None else []
        return max((need(s) for s in self.steps), default=0) + 4 * WINDOWS * TOKENS * min(inputs, default=0)

    @property
    def text(self) -> str | None:
        """What the model reads to show what its layers read: a UTF-8 file, or OWN_TEXT."""
        return self.calibration if self.ascend is None else self.ascend.calibration

    @property
    def actions(self) -> Counter[Action]:
        """How many tensors each action takes."""
        return Counter(s.action for s in self.steps)

    @property
    def fingerprint(self) -> str:
        """Names this very job: source files, steps and header bytes. A journal of another job is never resumed."""
        h = hashlib.sha256()
        root = self.source.path
        states = {path.absolute(): state_of(path.stat()) for path in (_files(root) if root.is_dir() else [root])}
        for path, state in sorted({**states, **self.source.opened}.items()):
            h.update(os.fsencode(path.name) + f" {state[1:]}\n".encode())
        for s in self.steps:
            h.update(f"{s.map.source} {s.map.target} {s.map.shape} {s.action} {s.source} {s.target} ".encode())
            h.update(f"{s.target.tile if isinstance(s.target, Tiled) else None}\n".encode())
        for f in self.layout.files:
            h.update(f"{f.name} {f.size}\n".encode())
            for offset, data in f.pieces:
                h.update(f"{offset} ".encode() + data)
        for name, values in sorted(self.importance.items()):
            h.update(name.encode() + values.tobytes())
        if self.ascend is not None:
            h.update(repr(self.ascend).encode())
        if (text := self.text) is not None:
            h.update(text.encode())
            h.update(b"" if text == OWN_TEXT else read_text(text).encode())
        return h.hexdigest()


def _files(root: Path) -> list[Path]:
    """What lies in a folder and in the folders of its layers (Trellis v2)."""
    return [p for top in sorted(root.iterdir()) for p in ([top, *sorted(top.iterdir())] if top.is_dir() else [top])]


def with_name(plan: Plan, path: Path) -> Plan:
    """The same plan under the target's own name: a file, or the members of a split model NAME-00001-of-0000N.gguf."""
    if plan.layout.folder:
        return plan
    old, new = Path(DEFAULT_NAME).stem, path.name.removesuffix(".gguf")
    single = len(plan.layout.files) == 1
    names = {f.name: path.name if single else new + f.name.removeprefix(old) for f in plan.layout.files}
    slots = {key: replace(slot, file=names[slot.file]) for key, slot in plan.layout.slots.items()}
    files = tuple(replace(f, name=names[f.name]) for f in plan.layout.files)
    return replace(plan, layout=Layout(files, slots, False))
