"""The forms of codes: what `quantize` and `unpack` return and `pack` takes. polyquant.types exports them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]
U8: TypeAlias = NDArray[np.uint8]
I8: TypeAlias = NDArray[np.int8]

__all__ = [
    "F32", "I8", "U8", "Activation", "Affine", "Blocks", "Floats", "Form", "ScaledFloats", "Ternary", "TrellisCode",
    "TrellisCodes",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Floats:
    """Unquantized values [rows, K] of any float or integer dtype."""

    values: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Ternary:
    """Ternary codes int8 [rows, K] in {-1, 0, +1}; weight = codes * scale.

    scale: float32, [1] (one for the tensor) or [rows, G] (G groups of K / G columns; G = 1: one per row).
    """

    codes: I8
    scale: F32


@dataclass(frozen=True, slots=True)
class Activation:
    """Static int8 quantization of a linear layer's inputs, x = (q - offset) * scale, and its output scales.

    y = (q W^T + quant_bias) * deq_scale with integer codes q and W, where deq_scale = scale * the scale of W, and
    quant_bias includes the layer's bias and the correction for the offset: round(bias / deq_scale - offset * sum of a
    row of W). scale, offset: float32 [1]; deq_scale: float32 [rows] or [1]; quant_bias: int32 [rows].
    """

    scale: F32
    offset: F32
    deq_scale: F32
    quant_bias: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Affine:
    """Affine-quantized integers: weight = (codes - offset) * scale [+ bias].

    bits: 2 to 8, signed: codes int8 [rows, K] from -2^(bits - 1) to 2^(bits - 1) - 1. scale, offset: float32 [rows, G],
    one per K / G columns; offsets (zero points) are integers in the range of the codes, all 0 if symmetric. bias: None,
    or float32 [rows, G] of codecs that store a float instead of a zero point; every offset is then -2^(bits - 1), so
    that codes - offset counts from 0. activation: for linear layers with statically quantized inputs. index: the group
    of each column, int32 [K], where that is not k // (K / G) ("act-order").
    """

    bits: int
    codes: I8
    scale: F32
    offset: F32
    activation: Activation | None = None
    bias: F32 | None = None
    index: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class Blocks:
    """Codes that are only defined within their blocks (K, IQ, fp4 types): packed bytes [rows, bytes_per_row] of that
    codec.
    """

    codec: str
    blocks: U8


@dataclass(frozen=True, slots=True)
class ScaledFloats:
    """Small floats with block scales: weight = value of the code * scale of its block [* or / the tensor's scale].

    element: "e2m1", "e4m3" or "e5m2". codes: uint8 [rows, K], one float per byte; e2m1 in the lower four bits. kind:
    "e8m0" (2^(byte - 127)) or "e4m3": `scale` holds bytes, uint8; or a float dtype, "f16", "bf16" or "f32": `scale` is
    float32. scale: [R, C], one for `block` = (rows, columns) weights, partial at the edges; 0 means all of them.
    start: the first row of `codes` in the weight, so that rows of a block table are known. tensor: the scale of the
    whole tensor, float32 [1], which multiplies or `divides`; None without one. inputs: the static scale of the layer's
    inputs, float32 [1], which multiplies their codes, or `divides` as well; None without one. In a stack whose matrices
    have their own scales both are float32 [rows, 1]. paired: `codes` holds two e2m1 in a byte, [rows, K / 2], the even
    column in the lower four bits.
    """

    element: str
    codes: U8
    kind: str
    scale: NDArray[Any]
    block: tuple[int, int]
    start: int = 0
    tensor: F32 | None = None
    divides: bool = False
    inputs: F32 | None = None
    paired: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        rows, width = self.codes.shape
        return rows, 2 * width if self.paired else width


@dataclass(frozen=True, slots=True)
class TrellisCode:
    """The decoding of a code stream: value j = codebook(the `window_bits` bits from bit `bits` * j of a circular
    stream).

    codebook: "grid", "mul1", "mcg", "3inst" or "lut"; tile_order: order of the 16 x 16 values of a tile in its stream.
    hadamard: sizes of the rotated blocks along K and along N; 1 for none.
    """

    bits: int
    codebook: str
    window_bits: int
    tile_order: str
    hadamard: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TrellisCodes:
    """A weight [N, K] as codes of 16 x 16 tiles of its transpose: W^T = diag(su) H_K (scale * values) H_N diag(sv).

    code: the decoding. codes: uint8 [ceil(K / 16), ceil(N / 16), 256] in stream order. scales: float32 [G, N], one row
    per ceil(K / G) inputs. su: float32 [K]; sv: float32 [N]. table: float32 [2 ** window_bits] for the codebook "lut",
    else None.
    """

    code: TrellisCode
    codes: U8
    scales: F32
    su: F32
    sv: F32
    table: F32 | None = None


Form: TypeAlias = Floats | Ternary | Affine | Blocks | ScaledFloats | TrellisCodes
