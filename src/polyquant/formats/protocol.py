"""The protocols of formats. A format is one object, built in or from an entry point; no other code knows its name.

    Format   detect, open and check a file or folder; registered as "module:OBJECT" in the group `polyquant.formats`
    Target   write it; None if the format is read-only

A conversion calls the target in this order:

    recipe -> refuse -> for_model -> choose (each tensor) -> prepare -> lay_out -> warnings -> worker
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    "HasSchemes",
    "NamesReaders",
    "OnTensor",
    "Planning",
    "ReportsLayerTypes",
    "TakesArrays",
    "Target",
    "Worker",
]

OnTensor = Callable[[int, int, str], None]
"""Called during long measurements of a plan: tensors done, total, name."""


class Format(Protocol):
    """One format. Methods import modules when called, so that listing all formats stays cheap."""

    @property
    def name(self) -> str:
        """The name in the registry, for `--to`, and `Checkpoint.format`."""

    @property
    def title(self) -> str:
        """The title in messages, in the plural: "GGUF files"."""

    @property
    def priority(self) -> int:
        """Order of detection, descending; more specific formats have higher numbers."""

    @property
    def open_options(self) -> type:
        """Frozen dataclass of open options: properties that the bytes do not show (options.option)."""

    @property
    def target(self) -> Target | None:
        """The writing half; None if the format is read-only."""

    @property
    def findings(self) -> Mapping[str, str]:
        """Code of a finding -> explanation: meaning, consequences, what to do."""

    def sniff(self, path: Path) -> Evidence | None:
        """Evidence that the path holds this format, judged by content; None if not. Never raises for a foreign file."""

    def open(self, path: Path, options: Any) -> Checkpoint:
        """Open a path; reads headers only. options: an instance of `open_options`.

        Raises InputError, UnsupportedError.
        """

    def check(self, path: Path) -> Iterable[Finding]:
        """Findings about the structure. Does not raise for a broken file: that is a finding."""

    def own_files(self, folder: Path, names: Iterable[str]) -> set[str]:
        """The files in a folder that belong to a model of this format, so that `--overwrite` may remove them."""

    def carry(self, checkpoint: Checkpoint) -> Translation:
        """Names, metadata and small files unchanged, for a target with the same naming scheme."""

    def plain(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint for a target of another format, without properties specific to this one; its `format` may
        change.
        """


@runtime_checkable
class ChecksConsumers(Protocol):
    """A format that can check a folder against programs that only it knows; `analysis.consumers` knows others."""

    consumers: tuple[str, ...]
    """Names of these programs."""

    def check_consumer(self, path: Path, name: str) -> Iterable[Finding]:
        """Findings about what the named program rejects or computes wrongly. Raises UnknownNameError."""


@runtime_checkable
class ReportsLayerTypes(Protocol):
    """A format whose files state the quantization type of every layer."""

    def layer_types(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        """Matrix -> the stated type."""


@runtime_checkable
class NamesReaders(Protocol):
    """A format whose files other programs read, with a command for each (used by model cards)."""

    readers: Mapping[str, str]
    """Program -> command, with {repo} and {file} for the model's place on the hub."""


@runtime_checkable
class HasSchemes(Protocol):
    """A format that stores weights in several quantization schemes, each a target with a name."""

    @property
    def schemes(self) -> Mapping[str, str]:
        """Name for `--to` -> the codec for floats. The target has the option `scheme`."""


@runtime_checkable
class TakesArrays(Protocol):
    """A format that can store tensors without a model (`polyquant.save`)."""

    def of_arrays(
        self, tensors: tuple[TensorMap, ...], metadata: Mapping[str, Any], path: Path
    ) -> tuple[Translation, Mapping[str, Any]]:
        """Metadata and files for the tensors, and target options that follow from the path. Raises PlanError."""


@runtime_checkable
class DeclaresCodecs(Protocol):
    """A format that declares its codecs (`polyquant formats`, `polyquant codecs`)."""

    @property
    def name(self) -> str:
        """See Format."""

    @property
    def files(self) -> str:
        """A description of a model's files, e.g. "one .gguf file"."""

    def reads(self, codec: Codec) -> bool:
        """True if opened files can contain weights of this codec."""

    def writes(self, codec: Codec) -> bool:
        """True if a conversion can store weights of this codec."""


class Choice(NamedTuple):
    """The codec of one target tensor, and the reason printed in the plan.

    instead_of: name of the requested codec if its blocks do not fit the rows.
    """

    codec: Codec
    why: str
    instead_of: str = ""


class Target(Protocol):
    """The writing half of a format. `options` in every signature is an instance of the class `options`."""

    @property
    def options(self) -> type:
        """Frozen dataclass of its options (options.option), the source of flags, grouped help and keywords."""

    @property
    def naming(self) -> str:
        """The naming scheme it writes (Checkpoint.naming): "hf" (Hugging Face), "gguf", or a special one."""

    @property
    def suffix(self) -> str:
        """The suffix of a single-file target, e.g. ".gguf"; "" for a folder."""

    @property
    def smaller(self) -> Mapping[str, Any]:
        """The default options of `quantize`."""

    def claims(self, requested: Mapping[str, Any]) -> bool:
        """True if these options (see options.given) imply this target, if neither `--to` nor the name specifies one."""

    def recipe(self, chosen: Recipe, rules: Sequence[Rule], options: Any, *, named: bool) -> Recipe:
        """The recipe with rules. named: from --codec or --recipe. Raises PlanError if the target cannot store it."""

    def refuse(self, options: Any, importance: Mapping[str, F32] | None) -> None:
        """Raise PlanError or InputError for incompatible options, before any computation."""

    def for_model(self, source: Checkpoint, translation: Translation, options: Any) -> Any:
        """The options, completed from the model."""

    def translate(self, source: Checkpoint, recipe: Recipe, options: Any) -> Translation:
        """Translate names, metadata and files of a source with another naming scheme."""

    def choose(self, source: Checkpoint, tensor: TensorMap, recipe: Recipe, facts: Facts, options: Any) -> Choice:
        """Choose the codec of one tensor."""

    def prepare(self, planning: Planning) -> tuple[Planning, list[Step]]:
        """Plan the steps, after computations on the model (bits, layers to keep, ranges). Raises PlanError."""

    def lay_out(self, planning: Planning, steps: Sequence[Step]) -> Layout:
        """Lay out files, header bytes and the place of every part."""

    def warnings(self, planning: Planning, steps: Sequence[Step]) -> tuple[str, ...]:
        """Warnings for users of the output."""

    def method(self, planning: Planning, steps: Sequence[Step]) -> str | None:
        """The search method, for the printed plan."""

    def text(self, steps: Sequence[Step], options: Any) -> str | None:
        """The calibration text of the conversion: a file, or "self"."""

    def worker(self, context: Context) -> Worker | None:
        """The worker of steps that are not plain conversions; None if all are."""


@dataclass(frozen=True, slots=True)
class Planning:
    """A plan under construction. options: of the target; facts: for the recipe's rules. measured: results of long
    measurements on the model, by name; an equal plan in another process takes them from here.
    """

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
    measured: dict[str, Any] = field(default_factory=dict)

    def measure(self, name: str, call: Callable[[], Any]) -> Any:
        """The result of a measurement, which runs unless `measured` has it."""
        if name not in self.measured:
            self.measured[name] = call()
        return self.measured[name]

    @no_collection()
    def steps(self) -> list[Step]:
        """A step per tensor, as the target chooses with these options and this recipe. Raises PlanError."""
        return [*(self.make_step(t, partial(self._choose, t)) for t in self.translation.tensors), *self.constants]

    def _choose(self, tensor: TensorMap) -> Choice:
        return self.target.choose(self.source, tensor, self.recipe, self.facts, self.options)

    def refuse_lossy(
        self, steps: Sequence[Step], hint: str = "start from the float model, or pass --requantize"
    ) -> None:
        """Raise PlanError for steps that requantize without permission."""
        lossy = [s for s in steps if s.action is Action.REQUANTIZE]
        if lossy and not self.requantize:
            raise PlanError(
                f"{len(lossy)} tensors are already quantized; requantizing them loses more",
                file=self.source.path,
                tensor=lossy[0].map.origin,
                expected="float source",
                found=f"{lossy[0].source} -> {lossy[0].target}",
                hint=hint,
            )

    def with_changes(self, *, options: Any = None, named: str | None = None) -> Planning:
        """A copy with other options, or another recipe name."""
        recipe = self.recipe if named is None else replace(self.recipe, name=named)
        return replace(self, options=self.options if options is None else options, recipe=recipe)


@dataclass(frozen=True, slots=True)
class Context:
    """The inputs of a worker. floats: a step -> its whole source as float32 [rows, K] in the target's order.

    tick: called with the finished share of a calibration. stages: called with a calibration text, returns the
    GatheringStages (calibration.hessians) of the source; shared: they are shared with other processes of the job.
    """

    source: Checkpoint
    steps: tuple[Step, ...]
    options: Any
    importance: Mapping[str, F32]
    floats: Callable[[Step], F32]
    tick: Callable[[float], None]
    stages: Callable[..., Any]
    shared: bool = False


class Worker(Protocol):
    """Executes some steps of a conversion in a special way. Called from several threads after `order`."""

    def order(self, steps: Sequence[Step]) -> list[Step]:
        """The remaining steps in execution order; calibration runs here. Raises InputError, UnsupportedError."""

    def takes(self, step: Step) -> bool:
        """True if `pieces` executes this step instead of the plain conversion."""

    def pieces(self, step: Step, rows: slice | None, *, measure: bool) -> Iterable[Piece]:
        """Execute the step, or rows [a, b) of it. Raises CodecError."""

    def stated(self, step: Step, error: ErrorSums) -> Mapping[str, NDArray[Any]]:
        """Parts of the layout that state the error of a finished step."""
