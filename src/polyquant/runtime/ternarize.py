"""Make BitNet master weights ternary in memory: training leaves floats, the model multiplies by ternary weights.

codes = round(w / s) clipped to -1 ... 1 with s = mean|w| (quantizers/absmean.py), s rounded to the dtype of the weight,
as transformers' `autobitlinear` does online. A weight that is already ternary (all values -s, 0 or s) keeps its s.
Stored as i2_s.x86: two bits per weight.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from polyquant.codecs.i2_s import I2_S_X4, I2_S_X86
from polyquant.errors import CodecError, InputError
from polyquant.quantizers.absmean import absmean_codes
from polyquant.rows import in_memory
from polyquant.types import Ternary, Weight

__all__ = ["ternarized"]

_NARROW: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


def ternarized(weight: Weight, *, file: object = None) -> Weight:
    """Convert a float weight [N, K] to packed ternary codes with one scale. Raises InputError for NaN and infinity."""
    floats = weight.dequantize()
    if not np.isfinite(floats).all():
        raise InputError("a master weight holds NaN or infinity", file=file, tensor=weight.name)
    codec = I2_S_X86 if weight.shape[1] % 128 == 0 else I2_S_X4
    try:
        ternary = codec.quantize(floats)
    except CodecError:  # not ternary yet
        ternary = absmean_codes(weight)
        ternary = Ternary(
            ternary.codes, ternary.scale.astype(_NARROW.get(weight.codec.name, np.float32)).astype(np.float32)
        )
    parts = codec.pack(ternary)
    return Weight(weight.name, weight.shape, codec, in_memory(parts))
