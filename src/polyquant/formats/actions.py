"""The action of a step, and whether stored rows of its sources are kept."""

from __future__ import annotations

from collections.abc import Sequence

from polyquant.capabilities import HoldsBlocks, claims
from polyquant.codecs import affine_forms, float_forms
from polyquant.codecs.trellis_forms import same_codes as same_trellis
from polyquant.operations import Same
from polyquant.registry import codec
from polyquant.rows import one_matrix
from polyquant.types import Action, Affine, Blocks, Codec, Floats, ScaledFloats, TensorMap, TrellisCodes, Weight

__all__ = ["action_of", "blocks_of", "common", "same_codes", "survives"]


def common(weights: Sequence[Weight]) -> Codec:
    """The codec of all sources. If they differ: the widest float type of floats, else the first quantized one."""
    codecs = {w.codec.name: w.codec for w in weights}
    if len(codecs) == 1 or all(c.form is Floats for c in codecs.values()):
        return codec("f32") if len(codecs) > 1 else weights[0].codec
    return next(c for c in codecs.values() if c.form is not Floats)


def survives(weights: Sequence[Weight], tensor: TensorMap) -> bool:
    """True if the target's rows are stored rows of its sources. Also for a vector whose values are only permuted."""
    op, shapes = tensor.op, [w.shape for w in weights]
    if isinstance(op, Same):
        return True
    forms = {w.codec.form for w in weights}
    if forms == {Floats} and len(tensor.shape) < 2 and op.moves:
        return True
    return TrellisCodes not in forms and op.keeps_rows(shapes)  # trellis weights are rotated as a whole


def action_of(weights: Sequence[Weight], target: Codec, tensor: TensorMap) -> Action:
    """The action of a step."""
    if tensor.ternarize:
        return Action.QUANTIZE
    if survives(weights, tensor):
        weights, op = one_matrix(weights, tensor.op)
        separable = len(weights) == 1 or target.form not in (Affine, ScaledFloats) or target.row_sliced
        separable = separable and (target.form is not ScaledFloats or float_forms.moves_rows(target, op))
        if separable and all(w.codec.name == target.name for w in weights):
            return Action.COPY
        if all(same_codes(w, target, tensor) for w in weights):
            return Action.TRANSCODE
    if all(w.codec.form is Floats for w in weights):
        return Action.TRANSCODE if target.form is Floats else Action.QUANTIZE
    return Action.DEQUANTIZE if target.form is Floats else Action.REQUANTIZE


def same_codes(weight: Weight, target: Codec, tensor: TensorMap) -> bool:
    """True if the target can store the same codes."""
    (weight,), op = one_matrix([weight], tensor.op)
    have = weight.codec
    if Affine in (have.form, target.form):
        joined = len(tensor.sources) > 1 and not target.row_sliced
        return not joined and affine_forms.same_codes(weight, target)
    if ScaledFloats in (have.form, target.form):
        apart = len(tensor.sources) == 1 or (have.row_sliced and target.row_sliced)
        apart = apart or float_forms.stacks(target, op, weight.shape)
        moves = all(c.form is not ScaledFloats or float_forms.moves_rows(c, op) for c in (weight.codec, target))
        return apart and moves and float_forms.same_floats(weight, target)
    if have.form is target.form and have.form not in (Blocks, TrellisCodes):
        return True
    if have.form is Blocks and target.form is Blocks:
        return blocks_of(have) == blocks_of(target)
    return same_trellis(have, target, tensor.shape)


def blocks_of(codec: Codec) -> str:
    """The codec whose blocks a codec stores: itself in most cases."""
    return codec.holds if claims(codec, HoldsBlocks) else codec.name  # type: ignore[type-abstract]
