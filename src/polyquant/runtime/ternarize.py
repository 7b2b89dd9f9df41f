"""BitNet master weights in memory: what a training run leaves is floats, what the model multiplies with is ternary.

codes = round(w / s) clipped to -1 ... 1 with s = mean|w| (quantizers/absmean.py), s rounded to the dtype of the weight, as transformers'
`autobitlinear` does online. A weight that is ternary already (all numbers -s, 0 or s) keeps its s. Held as i2_s.x86: two bits a weight.
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
    """A float weight [N, K] -> the same as ternary codes with one scale, packed in memory. Raises InputError for NaN and infinity."""
    floats = weight.dequantize()
    if not np.isfinite(floats).all():
        raise InputError("a master weight holds NaN or infinity", file=file, tensor=weight.name)
    codec = I2_S_X86 if weight.shape[1] % 128 == 0 else I2_S_X4
    try:
        found = codec.quantize(floats)
    except CodecError:  # not ternary yet
        found = absmean_codes(weight)
        found = Ternary(found.codes, found.scale.astype(_NARROW.get(weight.codec.name, np.float32)).astype(np.float32))
    parts = codec.pack(found)
    return Weight(weight.name, weight.shape, codec, in_memory(parts))
