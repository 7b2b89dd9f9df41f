"""MXFP4 in Hugging Face and MLX folders: ggml's mxfp4 (codecs/ggml_fp4.py) with codes and scales in two tensors.

    blocks u8 [rows, K / 2]     byte j of a row: low nibble weight 2j, high nibble weight 2j + 1
    scales u8 [rows, K / 32]    e: w = E2M1[q] * 2^(e - 127)

4.25 bits per weight. A ggml block is [e][qs 16] with weights j and j + 16 in byte j: the same codes in a different
order, so conversion only moves bits. The files of gpt-oss name the parts *_blocks [experts, rows, K / 32, 16] and
*_scales [experts, rows, K / 32]; compressed-tensors weight_packed, ModelOpt weight (and weight_scale), MLX weight (as
uint32 words of the same bytes) and scales.
Source: transformers 5.23, integrations/mxfp4.py (convert_moe_packed_tensors); llama.cpp's converter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.arguments import column_weights, finite, of_form, real, stored_bytes
from polyquant.codecs.blocks import check_columns
from polyquant.codecs.ggml_fp4 import MXFP4
from polyquant.codecs.keeping import SmallFloats
from polyquant.errors import CodecError
from polyquant.ops import grouped, small_floats
from polyquant.registry import Search
from polyquant.types import F32, ArraySpec, Blocks, Parts, Shape, as_matrix

__all__ = ["HF_MXFP4", "HFMxfp4"]

_BLOCK = 32
_SEARCH = Search("polyquant.quantizers.small_floats:quantize")


class HFMxfp4:
    """The codec; see the module docstring."""

    name = "hf_mxfp4"
    form = Blocks
    granule = (1, _BLOCK)
    row_sliced = True
    holds = MXFP4.name
    floats = SmallFloats("e2m1", "e8m0", (1, _BLOCK))

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<codec {self.name}>"

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """{"blocks": u8 [rows, K / 2], "scales": u8 [rows, K / 32]}. Raises CodecError if K is not a multiple of 32."""
        rows, k = check_columns(self.name, shape, _BLOCK)
        byte = np.dtype(np.uint8)
        return {"blocks": ArraySpec((rows, k // 2), byte), "scales": ArraySpec((rows, k // _BLOCK), byte)}

    def quantize(self, w: F32, *, importance: F32 | None = None) -> Blocks:
        """Quantize floats [..., K] to ggml's mxfp4 blocks, with the better of two powers of two for each.

        Raises CodecError.
        """
        w = real(self.name, w)
        rows, k = check_columns(self.name, w.shape, _BLOCK)
        weights = column_weights(importance, k)
        codes = _SEARCH(self.floats, finite(self.name, w).reshape(rows, k), weights)
        pairs = small_floats.pairs(codes.codes)
        return Blocks(self.holds, small_floats.join_blocks(pairs, codes.scale, _BLOCK, 1))

    def pack(self, codes: Blocks) -> dict[str, NDArray[np.uint8]]:
        """Pack ggml's mxfp4 blocks [rows, K / 32 * 17] to parts, losslessly. Raises CodecError for other blocks."""
        of_form(self, codes)
        if codes.codec != self.holds:
            raise CodecError("cannot pack codes of a different block type", expected=self.holds, found=codes.codec)
        blocks, scales = small_floats.split_blocks(codes.blocks, _BLOCK, 1)
        return {"blocks": blocks, "scales": scales}

    def unpack(self, parts: Parts, shape: Shape) -> Blocks:
        """Unpack parts to ggml's mxfp4 blocks, losslessly. Raises CodecError if a size does not match the shape."""
        specs = self.specs(shape)
        pairs, scales = (stored_bytes(self.name, parts, key, spec).reshape(spec.shape) for key, spec in specs.items())
        return Blocks(self.holds, small_floats.join_blocks(pairs, scales, _BLOCK, 1))

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Dequantize to float32, bit-exact with ggml's mxfp4."""
        return MXFP4.dequantize({"blocks": self.unpack(parts, shape).blocks}, shape, rows=rows, out=out)

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """Return a matmul handle (ops/matmul.py) on the stored bytes; None without a native kernel.

        Raises CodecError if a size does not match the shape.
        """
        specs = self.specs(shape).items()
        blocks, scales = (stored_bytes(self.name, parts, key, spec).reshape(spec.shape) for key, spec in specs)
        return grouped.handle(grouped.Grouped(blocks, "e2m1", as_matrix(shape), scales, _BLOCK))


HF_MXFP4 = HFMxfp4()
