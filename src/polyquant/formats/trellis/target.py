"""What becomes of each tensor of a Trellis v3 folder: which are quantized, with which codec, and what is told of where they came from."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from polyquant.codecs.trellis import Trellis
from polyquant.codecs.trellis_forms import exact_trellis
from polyquant.errors import PlanError
from polyquant.formats.steps import Step
from polyquant.formats.trellis.config import METHODS, Origin
from polyquant.recipes.recipe import Facts, Recipe, Rule, uniform
from polyquant.registry import codec
from polyquant.types import Action, Blocks, Checkpoint, Codec, Floats, Shape, TensorMap, TrellisCodes, Weight

__all__ = ["EFFORT", "Effort", "Method", "TrellisOptions", "choose", "is_linear", "keep", "layout_options", "method_of", "origin", "recipe_of", "warnings"]  # fmt: skip

Effort = Literal["fast", "default", "max"]
Method = Literal["trellis_viterbi", "trellis_ldlq"]
EFFORT: dict[str, int] = {"fast": 12, "default": 14, "max": 16}
"""Window of the code in bits: each two more take four times the time, and lower the error by 1 to 3 percent."""

_FLOAT_PARTS = ("embed", "embd", "router")
_FLOAT_MODULES = frozenset({
    "wte", "wpe", "lm_head", "output_layer", "embed_out", "score", "classifier", "gate", "shared_expert_gate",
    "ffn_gate_inp", "ffn_gate_inp_shexp",
})  # fmt: skip
_BYTES = {"float32": ("f32", 4), "float16": ("f16", 2), "bfloat16": ("bf16", 2)}


@dataclass(frozen=True, slots=True)
class TrellisOptions:
    """bits: of each quantized weight; effort: the window (EFFORT); codebook: "mul1", "mcg", "3inst" or "grid", which has no window.

    method: how codes are searched, by default with calibration where there is a text; calibration: a UTF-8 file, or "self" for text that the model
    writes; target_bpw: effective bits per quantized weight, in place of `bits`: then each tensor gets its own.
    """

    bits: int | None = None
    effort: Effort | None = None
    codebook: str | None = None
    method: Method | None = None
    calibration: str | None = None
    target_bpw: float | None = None

    @property
    def sizes(self) -> str | None:
        """The first option that says which codes, as the command line calls it; None if all are left out."""
        said = {
            "--bits": self.bits,
            "--target-bpw": self.target_bpw,
            "--effort": self.effort,
            "--codebook": self.codebook,
        }
        return next((name for name, value in said.items() if value is not None), None)

    @property
    def given(self) -> str | None:
        """The first option that says something."""
        said = {"--method": self.method, "--calibration": self.calibration}
        return self.sizes or next((name for name, value in said.items() if value is not None), None)

    @property
    def calibrated(self) -> bool:
        """True if codes are searched with Hessians."""
        return self.calibration is not None and self.method != "trellis_viterbi"

    def refuse(self) -> None:
        """Raises PlanError for options that do not go together."""
        if self.method not in (None, *METHODS):
            raise PlanError("no such method", expected=" or ".join(METHODS), found=self.method)
        if self.method == "trellis_ldlq" and self.calibration is None:
            raise PlanError(
                "trellis_ldlq needs to see the inputs of each layer",
                hint="add --calibration FILE, or --calibration self for text that the model writes",
            )
        if self.method == "trellis_viterbi" and self.calibration is not None and self.target_bpw is None:
            raise PlanError("trellis_viterbi reads no calibration text", hint="leave out --method, or --calibration")
        if self.target_bpw is not None and self.bits is not None:
            raise PlanError("--bits and --target-bpw say how small twice", hint="leave out one of them")
        if self.target_bpw is not None and not 2 <= self.target_bpw <= 16:
            raise PlanError("no such size", expected="2 to 9 bits per weight", found=self.target_bpw)

    def codec_name(self, bits: int) -> str:
        """The codec for a number of bits. Raises PlanError for options that do not go together, and for bits that it has not."""
        if not 2 <= bits <= 8:
            raise PlanError("no such width", expected="2 to 8 bits", found=bits)
        book = self.codebook or "mul1"
        if book == "grid":
            if self.effort is not None:
                raise PlanError("the codebook 'grid' has no window", hint="leave out --effort, or --codebook grid")
            return codec("trellis.3", codebook="grid", bits=bits, window_bits=bits).name
        return codec("trellis.3", codebook=book, bits=bits, window_bits=EFFORT[self.effort or "default"]).name


def recipe_of(chosen: Recipe, options: TrellisOptions, rules: Sequence[Rule], *, named: bool) -> Recipe:
    """The recipe for a Trellis target. named: --codec or --recipe gave `chosen`; else bits do, or the source's own codes are kept.

    A rule that says `trellis.K` and no more takes window and codebook from the options. Raises PlanError.
    """
    if named and options.sizes:
        raise PlanError(
            f"a codec or recipe says its own bits and window, so {options.sizes} says it twice",
            hint=f"leave out {options.sizes}, or write the options instead: --bits 3 --effort max",
        )
    options.refuse()
    bits = options.bits if options.target_bpw is None else 4  # each tensor's own are found later
    if bits is not None:
        chosen = uniform(options.codec_name(bits))
    elif options.given and not rules and not named:
        raise PlanError(f"{options.given} needs a number of bits", hint="add --bits 3")
    if chosen.base is not None and codec(chosen.base).form not in (TrellisCodes, Floats):
        raise PlanError(f"a Trellis folder cannot hold {chosen.base}", hint="choose --bits 2 to --bits 8")
    return chosen.with_rules([_with_window(r, options) for r in rules])


def _with_window(rule: Rule, options: TrellisOptions) -> Rule:
    bits = rule.codec.removeprefix("trellis.")
    return replace(rule, codec=options.codec_name(int(bits))) if bits.isdecimal() and bits != rule.codec else rule


def is_linear(name: str, shape: Shape) -> bool:
    """True for the matrix of a linear layer inside the network: no embedding, output head, norm, bias or router."""
    *path, last = name.split(".")
    if len(shape) != 2 or last != "weight" or not path:
        return False
    if any(word in part for part in path for word in _FLOAT_PARTS) or path == ["output"]:
        return False
    return path[-1] not in _FLOAT_MODULES and "norm" not in path[-1]


def choose(have: Codec, tensor: TensorMap, recipe: Recipe, facts: Facts) -> tuple[Codec, str]:
    """Rules may name any matrix; the recipe's own codec is for linear layers; the rest stays what it is."""
    names, shape = (tensor.target, *tensor.sources), tensor.shape
    rule = next((r for r in recipe.rules if len(shape) == 2 and r.applies(names, facts)), None)
    if rule is not None:
        return codec(rule.codec), f"rule {rule.match}"
    if recipe.base is None or not is_linear(tensor.target, shape):
        return keep(have, shape)
    wanted = codec(recipe.base)
    return (wanted, "") if wanted.form is TrellisCodes else keep(have, shape)


def keep(have: Codec, shape: Shape) -> tuple[Codec, str]:
    """For a tensor that no rule quantizes: its trellis codes, its float type, or the floats that it stands for."""
    if have.form is TrellisCodes:
        return exact_trellis(have, shape), "codes kept"
    if have.form is Floats:
        return have, "float"
    return codec("bf16" if have.form is Blocks else "f32"), "decoded to floats"


def origin(source: Checkpoint, weight: Weight, action: Action, count: int | None = None) -> Origin:
    """What `quantization_config.json` says of a quantized weight's source. Codes that are carried over keep what their file states: of the
    error, or 0, since nothing is lost here; of the original, or the size in config.json's dtype. count: numbers of the target, where it is made of a
    part of the weight, or of others like it."""
    if action not in (Action.COPY, Action.TRANSCODE):
        size = math.prod(weight.shape)
        return Origin(weight.nbytes * (size if count is None else count) // max(1, size), weight.codec.name)
    said = _stated(source, weight.name)
    mse, nbytes, dtype = (said.get(key) for key in ("mse", "original_bytes", "original_dtype"))
    word, size = _BYTES.get(str(source.config.get("dtype", source.config.get("torch_dtype"))), ("bf16", 2))
    if not (isinstance(nbytes, int) and 0 < nbytes < 1 << 60 and isinstance(dtype, str)):
        nbytes, dtype = size * math.prod(weight.shape), word
    return Origin(nbytes, dtype[:40], _number(mse) or 0.0)


def _states_error(source: Checkpoint, name: str) -> bool:
    """True if the source says the error of a weight."""
    return _number(_stated(source, name).get("mse")) is not None


def _number(found: object) -> float | None:
    """A mean squared error as a file states it; None for anything else."""
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < 1e90:
        return None
    return float(found)


def _stated(source: Checkpoint, name: str) -> Mapping[str, Any]:
    tensors = source.metadata.get("tensor_metadata")
    entry = tensors.get(name) if isinstance(tensors, Mapping) else None
    return entry if isinstance(entry, Mapping) else {}


def method_of(source: Checkpoint, actions: Sequence[Action], *, calibrated: bool) -> str:
    """`quantization_method`: how the codes were searched; codes that are all carried over keep what their file states."""
    searched = any(a in (Action.QUANTIZE, Action.REQUANTIZE) for a in actions)
    said = source.metadata.get("quantization_method")
    if not searched and said in METHODS:
        return str(said)
    carried = not searched and any(w.codec.name.startswith("exl3") for w in source.values())
    return "trellis_ldlq" if calibrated or carried else "trellis_viterbi"


def layout_options(source: Checkpoint, steps: Sequence[Step], options: TrellisOptions) -> dict[str, Any]:
    """What laying out a Trellis folder needs to know besides the tensors."""
    quantized = [s for s in steps if isinstance(s.target, Trellis)]
    origins = {s.map.target: origin(source, source[s.map.sources[0]], s.action, s.weights) for s in quantized}
    method = method_of(source, [s.action for s in quantized], calibrated=options.calibrated)
    return {"origins": origins, "method": method, "target_bits": options.bits}


def warnings(source: Checkpoint, files: Collection[str], steps: Sequence[Step]) -> tuple[str, ...]:
    """What a reader of the folder should know: errors that nobody states, tensors that stay float, a missing config.json."""
    out = []
    carried = [s.map.sources[0] for s in steps if isinstance(s.target, Trellis) and not s.searches]
    silent = [name for name in carried if not _states_error(source, name)]
    if silent:
        out.append(
            f"{len(silent)} weights of the source state no mean squared error (first: {silent[0]}); their codes are kept, and mse says 0: the loss of this step"
        )
    return (*out, *folder_warnings(files, steps))


def folder_warnings(files: Collection[str], steps: Sequence[Step]) -> tuple[str, ...]:
    """What any quantized folder may lack: codes of stacked experts, a config.json."""
    stacks = [s.map.target for s in steps if len(s.map.shape) > 2 and s.target.form is Floats]
    out = [f"{len(stacks)} tensors of more than two dimensions stay float (first: {stacks[0]})"] if stacks else []
    if "config.json" not in files:
        out.append("the source has no config.json: put one beside the weights, or nothing can run this folder")
    return tuple(out)
