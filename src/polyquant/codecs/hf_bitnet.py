"""Hugging Face's packed BitNet linears: four ternary weights per byte and one scale. 2 bits per weight.

    weight u8 [R/4, K]        byte [p, c]: bits 1-0 row p, 3-2 row R/4 + p, 5-4 row R/2 + p, 7-6 row 3R/4 + p;
                              code = bits - 1
    weight_scale bf16 [1]

    hf_bitnet.autobitlinear   w = code * weight_scale     quantization_config.linear_class = "autobitlinear":
                                                          microsoft/bitnet-b1.58-2B-4T
    hf_bitnet.bitlinear       w = code / weight_scale     "bitlinear", or no linear_class: HF1BitLLM, Falcon 1.58

Only config.json tells which of the two applies; other converters misread one of them. Bytes match transformers'
pack_weights (5.23). Published files also store weight_scale as float16 or float32: read as stored, written as bf16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from polyquant.capabilities import Cut
from polyquant.codecs.arguments import of_form, output, part, stored_bytes
from polyquant.codecs.ternary import Lanes, count_symbols, one_scale, scaled, ternarize
from polyquant.errors import CodecError
from polyquant.ops import matmul
from polyquant.types import F32, U8, ArraySpec, Parts, Shape, Ternary, as_matrix

__all__ = ["HF_BITNET_AUTOBITLINEAR", "HF_BITNET_BITLINEAR", "HFBitNet"]

_BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class HFBitNet:
    """A packed BitNet layout. inverse: weight_scale divides. lossy: ternarize any weight by its sign."""

    name: str
    inverse: bool
    lossy: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def form(self) -> type[Ternary]:
        """Ternary codes with one scale."""
        return Ternary

    @property
    def granule(self) -> tuple[int, int]:
        """A multiple of four rows, which share bytes."""
        return 4, 1

    @property
    def row_sliced(self) -> bool:
        """False: a packed row holds rows from all four quarters."""
        return False

    def configure(self, *, lossy: bool) -> HFBitNet:
        """Return the codec with other options. lossy=True: quantize accepts any weight (sign, scale max|w|)."""
        return replace(self, lossy=lossy)

    def lanes(self, shape: Shape) -> Lanes:
        """Layout of the payload: the whole matrix is one block."""
        rows, k = as_matrix(shape)
        return Lanes(max(1, rows * k // 4), high_first=False)

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """{"weight": u8 [R / 4, K], "weight_scale": bf16 [1]}. Raises CodecError if R is not a multiple of 4."""
        rows, k = as_matrix(shape)
        if rows % 4:
            raise CodecError(f"{self.name} needs a multiple of 4 rows", found=f"shape {list(shape)}")
        return {"weight": ArraySpec((rows // 4, k), np.dtype(np.uint8)), "weight_scale": ArraySpec((1,), _BF16)}

    def quantize(self, w: F32, *, importance: F32 | None = None) -> Ternary:
        """Quantize ternary floats [R, K]; ignores importance. Raises CodecError if w is not ternary (unless lossy)."""
        return ternarize(self.name, w, self.lossy)

    def pack(self, codes: Ternary) -> dict[str, NDArray[np.generic]]:
        """Pack codes to parts; the scale (or 1 / scale) is rounded to bf16.

        Raises CodecError for several scales, or one that bf16 cannot hold.
        """
        of_form(self, codes)
        shape = codes.codes.shape
        parts, payload = self.frame(shape, one_scale(self.name, codes))
        self.lanes(shape).pack(codes.codes, payload)
        return parts

    def frame(self, shape: Shape, scale: np.float32) -> tuple[dict[str, NDArray[np.generic]], U8]:
        """Return the parts with the scale filled in, and a view of the payload to fill. Raises CodecError.

        A scale of 0 (all weights are 0) is written as 1 if it divides.
        """
        specs = self.specs(shape)
        factor = np.float32(scale)
        if self.inverse:
            with np.errstate(over="ignore", divide="ignore"):
                factor = np.float32(1) / factor if factor else np.float32(1)
        stored = np.array([factor], np.float32).astype(_BF16)
        if not np.isfinite([scale, stored[0]]).all() or (factor and not stored[0]):
            raise CodecError(f"{self.name} cannot hold the scale {scale:.6g} as bf16")
        weight = np.empty(specs["weight"].shape, np.uint8)
        return {"weight": weight, "weight_scale": stored}, weight.reshape(-1)

    def payload(self, parts: Parts, shape: Shape) -> U8:
        """Return the packed bytes, flat. Raises CodecError if their shape does not match the weight's."""
        spec = self.specs(shape)["weight"]
        weight = stored_bytes(self.name, parts, "weight", spec, same_shape=True)
        return np.ascontiguousarray(weight).reshape(-1)

    def scale(self, parts: Parts, shape: Shape) -> F32:
        """Return the multiplier of the codes, float32 [1].

        weight_scale may be bf16 (or its bits as uint16), float16 or float32.
        """
        stored = part(parts, "weight_scale").reshape(-1)
        if stored.dtype == np.uint16:
            stored = stored.view(_BF16)
        if stored.size != 1 or stored.dtype not in (_BF16, np.float16, np.float32):
            raise CodecError("weight_scale must be one bf16 value", found=f"{stored.size} of {stored.dtype}")
        value = stored.astype(np.float32)
        if self.inverse:
            with np.errstate(divide="ignore", over="ignore"):
                value = np.float32(1) / value
        return value

    def cut(self, shape: Shape, index: int) -> tuple[HFBitNet, dict[str, Cut]]:
        """Raises CodecError: each byte holds rows from all quarters of the stack."""
        del index
        raise CodecError(
            f"{self.name} stacks cannot be split: each byte holds weights from all quarters of the stack",
            found=f"shape {list(shape)}",
        )

    def unpack(self, parts: Parts, shape: Shape) -> Ternary:
        """Unpack parts to codes [R, K]. Raises CodecError if a shape does not match the weight's."""
        codes = self.lanes(shape).unpack(self.payload(parts, shape))
        return Ternary(codes.reshape(as_matrix(shape)), self.scale(parts, shape))

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Return codes * scale; only `rows` are decoded if given."""
        payload, scale = self.payload(parts, shape), self.scale(parts, shape)
        count, k = as_matrix(shape)
        chosen = np.arange(count)[rows if rows is not None else slice(None)]
        target = shape if rows is None else (len(chosen), k)
        out = output(out, target)
        if rows is None:
            self.lanes(shape).dequantize(payload, float(scale[0]), out.reshape(-1))
        elif len(chosen):
            lane, packed = np.divmod(chosen, count // 4)
            symbols = payload.reshape(-1, k)[packed] >> (2 * lane).astype(np.uint8)[:, None] & 3
            scaled(np.array([-1, 0, 1, 0], np.int8)[symbols], scale, out.reshape(target))
        return out

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """Return a matmul handle (ops/matmul.py), or None if K is not a multiple of 32."""
        rows, k = as_matrix(shape)
        if k % 32:
            return None
        payload, scale = self.payload(parts, shape), float(self.scale(parts, shape)[0])
        return matmul.packed("hf_bitnet", payload, rows, k, scale=scale, lane_step=rows // 4)

    def symbol_histogram(self, parts: Parts, shape: Shape) -> NDArray[np.uint64]:
        """Counts of the symbols 0..3, uint64 [4]."""
        return count_symbols(self.payload(parts, shape))

    def count_undefined(self, parts: Parts, shape: Shape) -> int:
        """Number of symbols 3, which no quantizer writes."""
        return int(self.symbol_histogram(parts, shape)[3])


HF_BITNET_AUTOBITLINEAR = HFBitNet("hf_bitnet.autobitlinear", inverse=False)
HF_BITNET_BITLINEAR = HFBitNet("hf_bitnet.bitlinear", inverse=True)
