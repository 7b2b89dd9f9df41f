"""ChatGLM's own int8 and int4 weights (ChatGLM-6B, ChatGLM2, ChatGLM3): one symmetric scale per row.

    8 bits   weight i8 [N, K]           weight_scale f16 [N]
    4 bits   weight i8 [N, K / 2]       column 2 j in the HIGH nibble of byte j, 2 j + 1 in the low one; signed

    w = q * scale          scale = max |w| of the row / (2^(b - 1) - 1)

Names: chatglm.8   chatglm.4   .bf16 .f32 (dtype of the scales)
Source: quantization.py of THUDM/chatglm2-6b (facts); tests/vectors/msmodelslim/chatglm2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from polyquant.codecs.affine_codec import AffineCodec, group_count
from polyquant.codecs.arguments import exact_part
from polyquant.codecs.keeping import FLOAT_TYPES, Integers
from polyquant.errors import CodecError, UnknownNameError
from polyquant.types import F32, I8, ArraySpec, Parts, Shape

__all__ = ["NAMES", "ChatGLMInt", "chatglm_int_named"]

NAMES = {f"chatglm.{bits}{dtype}": None for bits in (4, 8) for dtype in ("", ".bf16", ".f32")}


@dataclass(frozen=True, slots=True)
class ChatGLMInt(AffineCodec):
    """ChatGLM weights. bits: 4 or 8. dtype: of the scales."""

    bits: int
    dtype: str = "f16"

    @property
    def name(self) -> str:
        """Codec name: the bits, and the dtype if it is not half precision."""
        return f"chatglm.{self.bits}" + (f".{self.dtype}" if self.dtype != "f16" else "")

    @property
    def row_sliced(self) -> bool:
        """True: rows are independent."""
        return True

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [N, K]. Raises CodecError for 4 bits and an odd K."""
        group_count(self.name, shape, 0)
        n, k = shape
        if k * self.bits % 8:
            raise CodecError(f"{self.name} packs two codes per byte", expected="an even K", found=list(shape))
        return {
            "weight": ArraySpec((n, k * self.bits // 8), np.dtype(np.int8)),
            "weight_scale": ArraySpec((n,), FLOAT_TYPES[self.dtype]),
        }

    @property
    def writable(self) -> bool:
        """False: no current tool reads this layout."""
        return False

    @property
    def integers(self) -> Integers:
        """Symmetric codes with one scale per row."""
        return Integers(self.bits, 0, self.dtype)  # type: ignore[arg-type]

    def tables(self, parts: Parts, shape: Shape) -> tuple[F32, F32, None]:
        """Scales and zero offsets, [N, 1]."""
        stored = exact_part(parts, "weight_scale", self.specs(shape)["weight_scale"])
        scale: F32 = np.ascontiguousarray(stored, np.float32)[:, None]
        return scale, np.zeros_like(scale), None

    def codes_of(self, parts: Parts, shape: Shape, rows: slice) -> I8:
        """Signed codes of rows [a, b)."""
        codes = np.asarray(exact_part(parts, "weight", self.specs(shape)["weight"])[rows])
        if self.bits == 4:  # int8 shifts keep the sign; the low nibble is moved up first
            codes = np.stack([codes >> 4, (codes << 4).astype(np.int8) >> 4], 2).reshape(len(codes), shape[1])
        return codes


@cache
def chatglm_int_named(name: str) -> ChatGLMInt:
    """Return the codec called `name`, e.g. "chatglm.4". Raises UnknownNameError."""
    if name not in NAMES:
        raise UnknownNameError("codec", name, NAMES)
    _, bits, *dtype = name.split(".")
    return ChatGLMInt(int(bits), *dtype)
