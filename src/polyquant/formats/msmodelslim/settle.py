"""Finish the steps of an msModelSlim folder that concern several tensors: option checks, norms and biases of the
dialect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import PlanError, UnusedCalibrationError
from polyquant.formats.linears import is_linear
from polyquant.formats.msmodelslim.choices import bias_type, kept, module_of, ranges_of
from polyquant.formats.msmodelslim.options import MsModelSlimOptions
from polyquant.formats.msmodelslim.prepare import derived
from polyquant.formats.plain_target import folder_warnings
from polyquant.formats.smoothing import marked, unsmoothed
from polyquant.formats.steps import Step
from polyquant.registry import codec
from polyquant.types import Action, Checkpoint, Codec, Floats, Shape, TensorMap, Weight

__all__ = ["settled", "warnings"]

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def settled(source: Checkpoint, steps: Sequence[Step], options: MsModelSlimOptions) -> list[Step]:
    """Complete the steps with biases and norms of the dialect. Raises PlanError for an inconsistent folder."""
    _refuse_steps(steps, options)
    quantized = {module_of(s.map.target) for s in steps if isinstance(s.target, MsModelSlim)}
    if options.calibrated_option is not None:
        steps = [*_smoothing(source, steps, options), *_derived(source, steps, options)]
    if options.dialect != "v0":
        steps = _without_copies(steps)
    biases = {f"{module}.bias" for module in quantized}
    out = [_bias(s, options) if s.map.target in biases else s for s in steps]
    if options.dialect == "v0" and (options.smooth is not None or source.format == "msmodelslim"):
        out += _norm_modules(out)
    return [replace(s, cut=_cut(s.target, options)) if s.quantizes else s for s in out]


def _refuse_steps(steps: Sequence[Step], options: MsModelSlimOptions) -> None:
    quantized = [s for s in steps if isinstance(s.target, MsModelSlim)]
    if not quantized:
        raise PlanError(
            "no weight would be quantized, so this would not be an msModelSlim folder",
            hint="choose a codec, e.g. --codec w8a16",
        )
    linears = [s.map.target for s in steps if is_linear(s.map.target, s.map.shape)]
    for glob in options.keep:
        if not any(kept(name, [glob]) for name in linears):
            raise PlanError(
                f"--keep {glob} matches no linear layer",
                hint=f"for example --keep '*{module_of(linears[-1]).rpartition('.')[2]}'" if linears else None,
            )
    fresh = [s for s in quantized if s.quantizes]
    static = [s for s in fresh if isinstance(s.target, MsModelSlim) and s.target.static]
    if options.calibration is not None:
        if not static and options.calibrated_option is None:
            raise UnusedCalibrationError(
                f"{(fresh or quantized)[0].target} does not use calibration",
                hint="omit --calibration, or add --effort max, --smooth or --kv",
            )
        return
    missing = [s.map.target for s in static if ranges_of(options, s) is None]
    if missing and options.ranges:
        raise PlanError(
            f"--ranges has no entry for {len(missing)} layers",
            tensor=missing[0],
            hint=f"add them to the file, or --keep '{module_of(missing[0])}'",
        )
    if missing:
        raise PlanError(
            f"{static[0].target.name} needs the input ranges of its layers",
            hint="add --calibration FILE (a text), or --ranges FILE; w8a16 and w8a8.dynamic need neither",
        )
    if options.ranges and not static:
        raise PlanError(f"{(fresh or quantized)[0].target} does not use ranges", hint="omit --ranges")


def _smoothing(source: Checkpoint, steps: Sequence[Step], options: MsModelSlimOptions) -> list[Step]:
    """Mark the steps whose floats smoothing changes."""
    return list(steps) if options.smooth is None else marked(source, steps, options.smooth)


def _equal(a: Weight, b: Weight) -> bool:
    return np.array_equal(a.dequantize(), b.dequantize())


def _derived(source: Checkpoint, steps: Sequence[Step], options: MsModelSlimOptions) -> list[Step]:
    """Steps for the tensors that calibration adds."""
    quantized = [s.map.source for s in steps if isinstance(s.target, MsModelSlim)]
    have = {s.map.target for s in steps}
    return [
        Step(
            TensorMap(t.name, (t.name,), t.shape, keep_float=True),
            None,
            t.codec,
            Action.COPY,
            "from calibration",
            _nbytes(t.codec, t.shape),
        )
        for t in derived(source, options, quantized).values()
        if t.name not in have
    ]


def _nbytes(target: Codec, shape: Shape) -> int:
    return sum(s.nbytes for s in target.specs(shape).values())


def _without_copies(steps: Sequence[Step]) -> list[Step]:
    """Remove v0's duplicates of norms: the second one is used, which fits the quantized layers."""
    copies = {_original(s.map.target): s for s in steps if _original(s.map.target) != s.map.target}
    single = [s for s in steps if _original(s.map.target) == s.map.target]
    return [
        replace(copies[name], map=replace(copies[name].map, target=name)) if (name := s.map.target) in copies else s
        for s in single
    ]


def _original(name: str) -> str:
    """norm.module.weight -> norm.weight; other names are unchanged."""
    return name.replace(".module.", ".") if name.endswith((".module.weight", ".module.bias")) else name


def _bias(step: Step, options: MsModelSlimOptions) -> Step:
    """Convert the float bias of a quantized layer to the dialect's type."""
    target = codec(bias_type(options))
    if step.source is None or step.source.form is not Floats or target.name == step.target.name:
        return step
    action = Action.COPY if step.source.name == target.name else Action.TRANSCODE
    return replace(step, target=target, action=action, nbytes=_nbytes(target, step.map.shape))


def _norm_modules(steps: Sequence[Step]) -> list[Step]:
    """Steps that copy smoothed norms for v0: norm.weight and norm.bias to norm.module.weight and norm.module.bias."""
    by_name = {s.map.target: s for s in steps}
    out = []
    for name, bias in by_name.items():
        norm = name.removesuffix(".bias")
        weight = by_name.get(f"{norm}.weight")
        if norm == name or weight is None or len(weight.map.shape) != 1 or f"{norm}.module.weight" in by_name:
            continue
        if not _is_norm(norm):
            continue
        for step, last in ((weight, "weight"), (bias, "bias")):
            out.append(replace(step, map=replace(step.map, target=f"{norm}.module.{last}"), why="duplicate for v0"))
    return out


def _is_norm(module: str) -> bool:
    return "norm" in module.rpartition(".")[2]


def _cut(target: Codec, options: MsModelSlimOptions) -> bool | None:
    """True if rows can be quantized in blocks: not with one grid for all (W8A8S finds outliers in the whole matrix),
    nor in a search.
    """
    if not isinstance(target, MsModelSlim):
        return None
    return not (target.tensor or target.kind == "w8a8s" or options.effort == "max")


def warnings(
    source: Checkpoint, files: Mapping[str, bytes], steps: Sequence[Step], smooth: str | None = None
) -> tuple[str, ...]:
    """Warnings for consumers of the folder: fused layers of two types, conflicting norms, unsmoothed norms, a missing
    config.json.
    """
    out = []
    if smooth is not None and (not_smoothed := unsmoothed(source, smooth)):
        first, why = next(iter(not_smoothed.items()))
        out.append(f"{len(not_smoothed)} norms before experts are not smoothed (first: {first}): {why}")
    copies = [m for s in steps if len((m := s.map).sources) == 1 and m.source != m.target == _original(m.source)]
    differing = [t.target for t in copies if t.target in source and not _equal(source[t.source], source[t.target])]
    if differing:
        out.append(
            f"{len(differing)} norms differ between float and quantized layers (first: {differing[0]}): only v0 can "
            "store both, the one for quantized "
            "layers is kept"
        )
    kinds = {
        module_of(s.map.target): str(s.target) if isinstance(s.target, MsModelSlim) else "float"
        for s in steps
        if len(s.map.shape) == 2
    }
    split = [
        (module, other)
        for module in kinds
        for family in _FUSED
        if module.rpartition(".")[2] == family[0]
        for other in (module.removesuffix(family[0]) + word for word in family[1:])
        if other in kinds and (kinds[other] == "float") != (kinds[module] == "float")
    ]
    if split:
        first, other = split[0]
        out.append(
            f"{len(split)} fused layers would have two types (first: {first} and {other}): vllm-ascend rejects such a "
            "folder; list both in --keep"
        )
    return (*out, *folder_warnings(files, steps))
