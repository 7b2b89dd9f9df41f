"""What a step does to a weight."""

from __future__ import annotations

from polyquant.codecs import affine_forms
from polyquant.codecs.trellis_forms import same_codes
from polyquant.types import Action, Affine, Blocks, Codec, Floats, TensorMap, TrellisCodes, Weight

__all__ = ["action_of"]


def action_of(weight: Weight, target: Codec, tensor: TensorMap) -> Action:
    """What a step does to a weight."""
    have = weight.codec
    if tensor.ternarize:
        return Action.QUANTIZE
    if have.name == target.name:
        return Action.COPY
    if _same_codes(weight, target, tensor):
        return Action.TRANSCODE
    if have.form is Floats:
        return Action.QUANTIZE
    return Action.DEQUANTIZE if target.form is Floats else Action.REQUANTIZE


def _same_codes(weight: Weight, target: Codec, tensor: TensorMap) -> bool:
    """True if the target holds the codes as they are."""
    have = weight.codec
    if Affine in (have.form, target.form):
        return affine_forms.same_codes(weight, target)
    if have.form is target.form and have.form not in (Blocks, TrellisCodes):
        return True
    return same_codes(have, target, tensor.shape)
