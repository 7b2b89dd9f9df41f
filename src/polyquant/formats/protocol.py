"""What a format is, and what it means to write one. A format is one object, built in or from an entry point; no other code knows its name.

    Format   how a file or folder is recognised, opened and checked          registry: "module:OBJECT" in the group `polyquant.formats`
    Target   what a conversion into it looks like; None if it is only read

A conversion asks the target in this order:

    recipe -> refuse -> for_model -> choose (each tensor) -> prepare -> lay_out -> warnings -> worker
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from numpy.typing import NDArray

from polyquant.errors import PlanError
from polyquant.formats.steps import Piece, Step
from polyquant.no_collection import no_collection
from polyquant.ops.metrics import ErrorSums
from polyquant.recipes.recipe import Facts, Recipe, Rule
from polyquant.types import F32, Action, Checkpoint, Codec, Evidence, Finding, Layout, TensorMap, Translation

__all__ = [
    "ChecksConsumers",
    "Choice",
    "Context",
    "DeclaresCodecs",
    "Format",
    "OnTensor",
    "Planning",
    "ReportsLayerTypes",
    "TakesArrays",
    "Target",
    "Worker",
]

OnTensor = Callable[[int, int, str], None]
"""Told of long measurements while a plan is made: tensors done, all, and the name."""


class Format(Protocol):
    """One format. Its methods import what they need when they are called, so that listing all formats stays cheap."""

    @property
    def name(self) -> str:
        """In the registry, for `--to`, and `Checkpoint.format`."""

    @property
    def title(self) -> str:
        """For messages, in the plural: "GGUF files"."""

    @property
    def priority(self) -> int:
        """Formats are asked in descending order whether a path is theirs; the more specific sniff has the higher number."""

    @property
    def open_options(self) -> type:
        """Frozen dataclass of what can be said of a file that its bytes do not tell (options.option)."""

    @property
    def target(self) -> Target | None:
        """How to write it; None if it is only read."""

    @property
    def findings(self) -> Mapping[str, str]:
        """Code of a finding -> what it means, what breaks, what to do."""

    def sniff(self, path: Path) -> Evidence | None:
        """Evidence that the path holds this format, by content; None if not. Never raises for a foreign file."""

    def open(self, path: Path, options: Any) -> Checkpoint:
        """Read headers. options: an instance of `open_options`. Raises InputError, UnsupportedError."""

    def check(self, path: Path) -> Iterable[Finding]:
        """What is wrong with the structure. Raises nothing for a broken file: that is a finding."""

    def own_files(self, folder: Path, names: Iterable[str]) -> set[str]:
        """Which of these files in a folder belong to a model of this format, so that `--overwrite` may remove them."""

    def carry(self, checkpoint: Checkpoint) -> Translation:
        """Names, metadata and small files as they are, for a target with the same naming."""

    def plain(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint for a target of another format: without what only this format has, and then of the format that it says."""


@runtime_checkable
class ChecksConsumers(Protocol):
    """A format that knows what programs reject."""

    def check_consumer(self, path: Path, name: str) -> Iterable[Finding]:
        """What the program of that name rejects or computes wrongly. Raises UnknownNameError."""


@runtime_checkable
class ReportsLayerTypes(Protocol):
    """A format whose files say the quantization type of every layer."""

    def layer_types(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        """Matrix -> the type that the file states."""


@runtime_checkable
class TakesArrays(Protocol):
    """A format that can hold tensors that belong to no model (`polyquant.save`)."""

    def of_arrays(
        self, tensors: tuple[TensorMap, ...], metadata: Mapping[str, Any], path: Path
    ) -> tuple[Translation, Mapping[str, Any]]:
        """What the files hold besides the tensors, and target options that follow from the path. Raises PlanError."""


@runtime_checkable
class DeclaresCodecs(Protocol):
    """A format that can list what it holds (`polyquant formats`, `polyquant codecs`)."""

    @property
    def name(self) -> str:
        """As of Format."""

    @property
    def files(self) -> str:
        """What a model consists of, e.g. "one .gguf file"."""

    def reads(self, codec: Codec) -> bool:
        """True if opening a file can give weights of this codec."""

    def writes(self, codec: Codec) -> bool:
        """True if a conversion can store weights of this codec."""


class Choice(NamedTuple):
    """The codec of one target tensor, and the reason that the plan prints."""

    codec: Codec
    why: str


class Target(Protocol):
    """What it means to write a format. `options` in every signature is an instance of the class `options`."""

    @property
    def options(self) -> type:
        """Frozen dataclass of its options (options.option): flags, grouped help and keywords come from it."""

    @property
    def naming(self) -> str:
        """Naming scheme that it writes (Checkpoint.naming): "hf" (Hugging Face), "gguf", or one of its own."""

    @property
    def suffix(self) -> str:
        """Of a single-file target, e.g. ".gguf"; "" for a folder."""

    @property
    def smaller(self) -> Mapping[str, Any]:
        """What `quantize` asks for where no option says how small."""

    def claims(self, asked: Mapping[str, Any]) -> bool:
        """True if these options (see options.given) can only mean this target, where neither `--to` nor the name says so."""

    def recipe(self, chosen: Recipe, rules: Sequence[Rule], options: Any, *, named: bool) -> Recipe:
        """The recipe with rules, if the target can hold it. named: --codec or --recipe gave it. Raises PlanError."""

    def refuse(self, options: Any, importance: Mapping[str, F32] | None) -> None:
        """PlanError, InputError for options that do not go together, before anything is computed."""

    def for_model(self, source: Checkpoint, translation: Translation, options: Any) -> Any:
        """The options with what follows from the model."""

    def translate(self, source: Checkpoint, recipe: Recipe, options: Any) -> Translation:
        """Names, metadata and files of a source with another naming scheme."""

    def choose(self, source: Checkpoint, tensor: TensorMap, recipe: Recipe, facts: Facts, options: Any) -> Choice:
        """Codec of one tensor."""

    def prepare(self, planning: Planning) -> tuple[Planning, list[Step]]:
        """The steps, after what needs the model's data (bits, layers to keep, ranges) or more than one tensor. Raises PlanError."""

    def lay_out(self, planning: Planning, steps: Sequence[Step]) -> Layout:
        """Files, header bytes and the place of every part."""

    def warnings(self, planning: Planning, steps: Sequence[Step]) -> tuple[str, ...]:
        """What a reader of the output should know."""

    def method(self, planning: Planning, steps: Sequence[Step]) -> str | None:
        """How codes are searched, for the printed plan."""

    def text(self, steps: Sequence[Step], options: Any) -> str | None:
        """The calibration text that the work reads: a file, or "self"."""

    def worker(self, context: Context) -> Worker | None:
        """Who does the steps that are not plain conversions of codes; None if all are."""


@dataclass(frozen=True, slots=True)
class Planning:
    """A plan in the making. `options`: of the target; facts: numbers for the recipe's rules."""

    source: Checkpoint
    target: Target
    translation: Translation
    recipe: Recipe
    facts: Facts
    options: Any
    make_step: Callable[[TensorMap, Callable[[], Choice]], Step]
    constants: tuple[Step, ...] = ()
    requantize: bool = False
    on_tensor: OnTensor | None = None

    @no_collection()
    def steps(self) -> list[Step]:
        """A step for each tensor, as the target chooses with these options and this recipe. Raises PlanError."""
        return [*(self.make_step(t, partial(self._choose, t)) for t in self.translation.tensors), *self.constants]

    def _choose(self, tensor: TensorMap) -> Choice:
        return self.target.choose(self.source, tensor, self.recipe, self.facts, self.options)

    def refuse_lossy(
        self, steps: Sequence[Step], hint: str = "start from the float model, or pass --requantize"
    ) -> None:
        """PlanError for steps that quantize a second time without leave."""
        lossy = [s for s in steps if s.action is Action.REQUANTIZE]
        if lossy and not self.requantize:
            raise PlanError(
                f"{len(lossy)} tensors are quantized already; quantizing them again loses more",
                file=self.source.path,
                tensor=lossy[0].map.origin,
                expected="float source",
                found=f"{lossy[0].source} -> {lossy[0].target}",
                hint=hint,
            )

    def but(self, *, options: Any = None, named: str | None = None) -> Planning:
        """The same with other options, or another name for the recipe."""
        recipe = self.recipe if named is None else replace(self.recipe, name=named)
        return replace(self, options=self.options if options is None else options, recipe=recipe)


@dataclass(frozen=True, slots=True)
class Context:
    """What a worker may use. floats: a step -> its whole source as float32 [rows, K] in the target's order; tick: told how far a calibration has come."""

    source: Checkpoint
    steps: tuple[Step, ...]
    options: Any
    importance: Mapping[str, F32]
    floats: Callable[[Step], F32]
    tick: Callable[[float], None]


class Worker(Protocol):
    """Does some steps of a conversion in a way of its own. Called from several threads after `order`."""

    def order(self, steps: Sequence[Step]) -> list[Step]:
        """The steps that are left to do, in the order of the work; calibration runs here. Raises InputError, UnsupportedError."""

    def takes(self, step: Step) -> bool:
        """True if `pieces` makes this step, not the plain conversion."""

    def pieces(self, step: Step, rows: slice | None, *, measure: bool) -> Iterable[Piece]:
        """The step, or rows [a, b) of it. Raises CodecError."""

    def stated(self, step: Step, error: ErrorSums) -> Mapping[str, NDArray[Any]]:
        """Parts of the layout that say the error of a finished step."""
