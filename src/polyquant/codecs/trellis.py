"""Trellis-coded weights in the Trellis v3 layout: tiles of 16 x 16, k bits per weight.

    indices u8 [ceil(K / 16), ceil(N / 16), 32 k]   tiles of W^T: 256 k-bit codes, a circular stream (ops/trellis.py)
    scales  f32 [G, N]                              one row per ceil(K / G) inputs
    su      f32 [K]      sv f32 [N]                 signs, or signs times channel scales
    lut     f32 [2 ** L]                            only for codebook "lut"

    W^T = diag(su) . H_K . (scales * values) . H_N . diag(sv)
    H: orthonormal, block-diagonal (ops/hadamard.py); the identity without rotation

Bits per weight: k + 32 (G / K + 1 / N + 1 / K). In a row-major tile, value 16 i + o belongs to input i and output o;
tiles at the edges of K or N are padded.

Codebook "grid" has L = k and is the one of files that name no codebook. Unrotated, each weight is
((value * scale) * sv) * su in float32, rounded to half precision, as Metal Marlin decodes it. Sources: QTIP
(arXiv 2406.11235), EXL3, Metal Marlin; for their disagreements see docs/formats/trellis.md.

    trellis.3                    mul1, L = 14, rotated, one group         trellis.3.mul1.16         another window
    trellis.3.mul1.14.flat       not rotated, groups of 128 inputs        trellis.3.grid            L = 3, not rotated
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyquant.capabilities import Cut
from polyquant.codecs.arguments import column_weights, exact_part, finite, of_form, output, real, stored_bytes
from polyquant.errors import CodecError, UnknownNameError
from polyquant.ops import matmul, native
from polyquant.ops import trellis as ops
from polyquant.ops.hadamard import LARGEST_BLOCK, block_size, hadamard
from polyquant.registry import Search
from polyquant.types import F32, ArraySpec, Parts, Rounding, Shape, TrellisCode, TrellisCodes, as_matrix

__all__ = ["NAMES",
    "TRELLIS_2", "TRELLIS_3", "TRELLIS_4", "TRELLIS_5", "TRELLIS_6", "TRELLIS_7", "TRELLIS_8",
    "Trellis", "TrellisSearch", "from_tiles", "restore", "tile_values", "trellis_named",
]  # fmt: skip

GROUP = 128
"""Inputs per scale group without rotation."""
NAMES: tuple[str, ...] = (
    *(f"trellis.{b}" for b in range(2, 9)),
    "trellis.3.mul1.16",
    "trellis.3.mul1.14.flat",
    "trellis.3.grid",
)
"""Common names of the family, suggested by errors."""


class TrellisSearch(Protocol):
    """A search for the codes and scales of a weight."""

    def __call__(
        self, codec: Trellis, w: F32, *, importance: F32 | None, hessian: F32 | None, book: F32
    ) -> TrellisCodes:
        """Return codes (without a table) of w.

        w: finite, [N, K], N >= 1. importance: [K]; hessian: [K, K]; book: the codebook, float32 [2 ** window_bits].
        """


@dataclass(frozen=True, slots=True, eq=False)
class Trellis:
    """A Trellis v3 codec.

    hadamard: True for the largest blocks that fit each axis, False for none, or block sizes (along K, along N).
    groups: rows of `scales`; None for 1 if rotated, else one per 128 inputs. search: the search for codes; it does not
    affect the meaning of the bytes.
    """

    bits: int
    codebook: str = "mul1"
    window_bits: int = 14
    hadamard: bool | tuple[int, int] = True
    groups: int | None = None
    tile_order: str = "row_major"
    search: TrellisSearch = field(default=Search("polyquant.quantizers.trellis_search:quantize"), repr=False)

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Codec name; includes every option that affects the bytes."""
        name = f"trellis.{self.bits}"
        plain = self.codebook == "grid"
        if (
            (self.codebook, self.window_bits) != ("mul1", 14)
            or self.hadamard is not True
            or self.tile_order != "row_major"
        ):
            name += f".{self.codebook}" + ("" if plain else f".{self.window_bits}")
        if self.hadamard is False and not plain:
            name += ".flat"
        elif self.hadamard is True and plain:
            name += ".rotated"
        elif isinstance(self.hadamard, tuple):
            name += ".h{}x{}".format(*self.hadamard)
        if self.tile_order != "row_major":
            name += f".{self.tile_order}"
        return name + (f".g{self.groups}" if self.groups is not None else "")

    @property
    def form(self) -> type[TrellisCodes]:
        """Trellis codes, per tile."""
        return TrellisCodes

    @property
    def granule(self) -> tuple[int, int]:
        """Any shape."""
        return 1, 1

    @property
    def row_sliced(self) -> bool:
        """False: tiles hold 16 outputs each, and a rotation mixes them."""
        return False

    def configure(self, **options: Any) -> Trellis:
        """Return the codec with other codebook, window_bits, hadamard, groups, tile_order or search.

        Codebook "grid" has window_bits = bits and is not rotated by default. Raises TypeError for unknown options,
        CodecError for invalid values.
        """
        if options.get("codebook", self.codebook) == "grid":
            options.setdefault("window_bits", self.bits)
            if self.codebook != "grid":
                options.setdefault("hadamard", False)
        return replace(self, **options)._checked()

    def _checked(self) -> Trellis:
        largest = 16 if self.codebook != "grid" else self.bits
        if self.codebook not in ops.CODEBOOKS:
            raise UnknownNameError("codebook", self.codebook, ops.CODEBOOKS)
        if (
            not 1 <= self.bits <= 8
            or not isinstance(self.window_bits, int)
            or not self.bits <= self.window_bits <= largest
        ):
            raise CodecError(
                "invalid window size",
                expected=f"window_bits from {self.bits} to {largest}",
                found=f"{self.window_bits!r}",
            )
        if self.tile_order not in ops.TILE_ORDERS:
            raise UnknownNameError("tile order", self.tile_order, ops.TILE_ORDERS)
        if self.groups is not None and self.groups < 1:
            raise CodecError("groups must be at least 1", found=self.groups)
        blocks = self.hadamard if isinstance(self.hadamard, tuple) else ()
        if any(b < 1 or b & (b - 1) or b > LARGEST_BLOCK for b in blocks):
            raise CodecError(f"Hadamard blocks must be powers of two up to {LARGEST_BLOCK}", found=blocks)
        return self

    def blocks(self, shape: Shape) -> tuple[int, int]:
        """Sizes of the Hadamard blocks along K and N. Raises CodecError if they do not divide the shape."""
        n, k = as_matrix(shape)
        if isinstance(self.hadamard, tuple):
            if k % self.hadamard[0] or n % self.hadamard[1]:
                raise CodecError("Hadamard blocks do not divide the weight", expected=self.hadamard, found=list(shape))
            return self.hadamard
        return (block_size(k), block_size(n)) if self.hadamard else (1, 1)

    def trellis(self, shape: Shape) -> Trellis:
        """Itself."""
        del shape
        return self

    def code(self, shape: Shape) -> TrellisCode:
        """Return the parameters that define the codes of a weight of this shape."""
        return TrellisCode(self.bits, self.codebook, self.window_bits, self.tile_order, self.blocks(shape))

    def group_count(self, shape: Shape) -> int:
        """Rows of `scales`."""
        _, k = as_matrix(shape)
        if self.groups is not None:
            return self.groups
        return 1 if self.hadamard is not False else -(-k // GROUP)

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [N, K]. Raises CodecError if blocks do not divide it."""
        return dict(_specs(self, tuple(shape)))

    def cut(self, shape: Shape, index: int) -> tuple[Trellis, dict[str, Cut]]:
        """Cut matrix `index` out of a stack: its columns of tiles, scales and sv; su is shared.

        Raises CodecError if a tile of 16 outputs, or a rotation block along N, spans two matrices.
        """
        n, k = shape[-2:]
        blocks = self.blocks(shape)
        if n % 16 or n % blocks[1]:
            unit = "a tile of 16 outputs" if n % 16 else f"the rotation of {blocks[1]} outputs"
            raise CodecError(
                f"this {self.name} stack cannot be split: {unit} spans two matrices", found=f"matrices {[n, k]}"
            )
        codec = self if self.blocks((n, k)) == blocks else replace(self, hadamard=blocks)
        own, tiles = slice(index * n, (index + 1) * n), slice(index * n // 16, (index + 1) * n // 16)
        cuts = {"indices": Cut((tiles,), 1), "scales": Cut((own,), 1), "su": Cut((slice(0, k),)), "sv": Cut((own,))}
        return codec, cuts | ({"lut": Cut((slice(0, 1 << self.window_bits),))} if self.codebook == "lut" else {})

    # ------------------------------------------------------------ layout

    def pack(self, codes: TrellisCodes) -> dict[str, NDArray[Any]]:
        """Pack codes to parts. Raises CodecError if they belong to another codec."""
        of_form(self, codes)
        shape = (len(codes.sv), len(codes.su))
        if codes.code != self.code(shape) or codes.scales.shape != (self.group_count(shape), shape[0]):
            raise CodecError(f"codes do not belong to {self.name}", expected=self.code(shape), found=codes.code)
        parts: dict[str, NDArray[Any]] = {
            "indices": ops.pack_bits(codes.codes, self.bits),
            "scales": np.asarray(codes.scales, np.float32),
            "su": np.asarray(codes.su, np.float32),
            "sv": np.asarray(codes.sv, np.float32),
        }
        return parts if codes.table is None else {**parts, "lut": codes.table}

    def unpack(self, parts: Parts, shape: Shape) -> TrellisCodes:
        """Unpack parts to codes. Raises CodecError if a part does not fit."""
        specs = self.specs(shape)
        packed = stored_bytes(self.name, parts, "indices", specs["indices"]).reshape(specs["indices"].shape)
        floats = {key: exact_part(parts, key, spec) for key, spec in specs.items() if key != "indices"}
        codes = ops.unpack_bits(packed, self.bits)
        return TrellisCodes(
            self.code(shape), codes, floats["scales"], floats["su"], floats["sv"], floats.get("lut")
        )  # fmt: skip

    # ------------------------------------------------------------ math

    def table(self, parts: Parts) -> F32:
        """Return the codebook, float32 [2 ** window_bits]."""
        if self.codebook == "lut":
            return exact_part(parts, "lut", ArraySpec((1 << self.window_bits,), np.dtype(np.float32)))
        return ops.codebook(self.codebook, self.window_bits)

    def quantize(
        self,
        w: ArrayLike,
        *,
        importance: ArrayLike | None = None,
        hessian: ArrayLike | None = None,
        table: F32 | None = None,
    ) -> TrellisCodes:
        """Quantize floats [N, K], minimising the weight error, or the output error for a Hessian (mean x x^T, [K, K]).

        importance: float32 [K], the diagonal of the Hessian if only that is known. table: float32 [2 ** window_bits],
        for codebook "lut". Raises CodecError for a non-matrix or NaN or infinity, numpy.linalg.LinAlgError for a
        Hessian that is not positive definite.
        """
        floats = real(self.name, w)
        shape = as_matrix(floats.shape)
        specs = self.specs(shape)
        target = finite(self.name, floats).reshape(shape)
        if (table is None) != (self.codebook != "lut"):
            raise CodecError("a table is required for codebook 'lut' and not allowed for others", found=self.codebook)
        book = ops.codebook(self.codebook, self.window_bits) if table is None else np.asarray(table, np.float32)
        n, k = shape
        weights = column_weights(importance, k)
        h = None if hessian is None else np.asarray(hessian, np.float32)
        if h is not None and h.shape != (k, k):
            raise CodecError("the Hessian does not fit this weight", expected=[k, k], found=list(h.shape))
        if n == 0:
            empty = {key: np.zeros(spec.shape, np.float32) for key, spec in specs.items() if key != "indices"}
            codes = np.zeros((*specs["indices"].shape[:2], ops.TILE), np.uint8)
            return TrellisCodes(self.code(shape), codes, empty["scales"], empty["su"], empty["sv"], table)
        return replace(self.search(self, target, importance=weights, hessian=h, book=book), table=table)

    def quantize_for(self, w: ArrayLike, hessian: ArrayLike) -> TrellisCodes:
        """Quantize floats [N, K], minimising the output error under a Hessian [K, K]. Raises as `quantize` does."""
        return self.quantize(w, hessian=hessian)

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts to float32 [N, K]. All rows are decoded even for `rows`, since the rotation mixes them."""
        if rows is not None:
            chosen = self.dequantize(parts, as_matrix(shape))[rows]
            result = output(out, chosen.shape)
            result.reshape(chosen.shape)[...] = chosen
            return result
        self.specs(shape)
        result = output(out, shape)
        matrix = as_matrix(shape)
        handle = self._handle(parts, shape) if native.lib() is not None and matrix[0] else None
        if handle is not None:
            handle.dequantize(result.reshape(matrix))
        else:
            codes = self.unpack(parts, shape)
            result.reshape(matrix)[...] = restore(tile_values(codes, self.table(parts)), codes)
        return result

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """Return a matmul handle (ops/matmul.py), or None if scale groups are not multiples of 128 inputs."""
        groups, (_, k) = self.group_count(shape), as_matrix(shape)
        if groups > 1 and -(-k // groups) % GROUP:
            return None
        return self._handle(parts, shape)

    def _handle(self, parts: Parts, shape: Shape) -> Any:
        specs = self.specs(shape)
        tiles = stored_bytes(self.name, parts, "indices", specs["indices"])
        table = self.table(parts)
        book = self.codebook
        levels = ops.fractions(table) if book == "lut" else ops.integer_levels(book, self.window_bits)
        return matmul.trellis(
            tiles,
            table,
            levels,
            shape=as_matrix(shape),
            bits=self.bits,
            window_bits=self.window_bits,
            book=book,
            tile_order=self.tile_order,
            blocks=self.blocks(shape),
            halves=book == "grid" and self.blocks(shape) == (1, 1),
            **{key: exact_part(parts, key, specs[key]) for key in ("scales", "su", "sv")},
        )

    def multiply(self, parts: Parts, shape: Shape, x: F32, rounding: Rounding) -> F32:
        """Reference of the packed kernel: x [T, K] -> x W^T [T, N].

        The input is quantized after its rotation, with one scale per 128 values.
        """
        if rounding == "none":
            return np.asarray(x @ self.dequantize(parts, shape).T, np.float32)
        codes, blocks = self.unpack(parts, shape), self.blocks(shape)
        levels, step, zero = (
            ops.fractions(self.table(parts))
            if codes.table is not None
            else ops.integer_levels(self.codebook, self.window_bits)
        )
        values = from_tiles(
            levels[ops.states(codes.codes, self.bits, self.window_bits)], (shape[1], shape[0]), self.tile_order
        ).astype(np.float32) * np.float32(step) + np.float32(zero)
        span = -(-shape[1] // len(codes.scales))
        inner = values * codes.scales[np.arange(shape[1]) // span]
        rounded = matmul.round_activations(hadamard(x * codes.su, blocks[0]), "wide")
        return np.asarray(hadamard(rounded @ inner, blocks[1]) * codes.sv, np.float32)


def from_tiles(tiles: NDArray[Any], shape: tuple[int, int], tile_order: str) -> NDArray[Any]:
    """Undo tiling: [tiles_k, tiles_n, 256] in stream order -> [K, N]."""
    rows, columns = tiles.shape[:2]
    if tile_order != "row_major":
        placed = np.empty_like(tiles)
        placed[..., ops.TILE_ORDERS[tile_order]] = tiles
        tiles = placed
    full = tiles.reshape(rows, columns, 16, 16).transpose(0, 2, 1, 3).reshape(16 * rows, 16 * columns)
    return full[: shape[0], : shape[1]]


def tile_values(codes: TrellisCodes, table: F32) -> F32:
    """Return the codebook values of a weight before scaling, [K, N]."""
    values = ops.decode(codes.codes, codes.code.bits, codes.code.window_bits, table)
    return from_tiles(values, (len(codes.su), len(codes.sv)), codes.code.tile_order)


def restore(values: F32, codes: TrellisCodes) -> F32:
    """Apply scales, rotations, su and sv to codebook values [K, N]; returns the weight [N, K]."""
    k = len(values)
    span = -(-k // len(codes.scales))
    scaled = values * codes.scales[np.arange(k) // span]
    block_k, block_n = codes.code.hadamard
    if block_k == block_n == 1:
        w = scaled * codes.sv * codes.su[:, None]
        if codes.code.codebook == "grid":
            w = w.astype(np.float16).astype(np.float32)
        return np.ascontiguousarray(w.T)
    rotated = hadamard(np.ascontiguousarray(scaled.T), block_k)  # [N, K]
    unrotated = hadamard(np.ascontiguousarray(rotated.T), block_n)  # [K, N]
    return np.ascontiguousarray(unrotated.T) * codes.sv[:, None] * codes.su


def trellis_named(name: str) -> Trellis:
    """Return the codec called `name`, the inverse of `Trellis.name`. Raises UnknownNameError."""
    words = name.split(".")[1:]
    unknown = UnknownNameError("codec", name, NAMES)
    options: dict[str, Any] = {}
    try:
        bits = int(words.pop(0))
        if words and words[0] in ops.CODEBOOKS:
            options["codebook"] = words.pop(0)
            if options["codebook"] != "grid":
                options["window_bits"] = int(words.pop(0))
        for word in words:
            if word == "flat":
                options["hadamard"] = False
            elif word == "rotated":
                options["hadamard"] = True
            elif word in ops.TILE_ORDERS:
                options["tile_order"] = word
            elif word.startswith("h"):
                k, n = word[1:].split("x")
                options["hadamard"] = (int(k), int(n))
            elif word.startswith("g"):
                options["groups"] = int(word[1:])
            else:
                raise unknown
        return Trellis(bits).configure(**options)
    except (ValueError, IndexError, CodecError):
        raise unknown from None


TRELLIS_2, TRELLIS_3, TRELLIS_4 = Trellis(2), Trellis(3), Trellis(4)
TRELLIS_5, TRELLIS_6, TRELLIS_7, TRELLIS_8 = Trellis(5), Trellis(6), Trellis(7), Trellis(8)


@lru_cache(maxsize=1 << 12)
def _specs(codec: Trellis, shape: Shape) -> dict[str, ArraySpec]:
    """See Trellis.specs; cached because plans query 70,000 experts of a few shapes."""
    n, k = as_matrix(shape)
    if k <= 0 or n < 0:
        raise CodecError(f"{codec.name} needs at least one column", found=f"shape {list(shape)}")
    codec.blocks(shape)
    if codec.group_count(shape) > k:
        raise CodecError("more scale groups than inputs", expected=f"at most {k}", found=codec.group_count(shape))
    f32 = np.dtype(np.float32)
    parts = {
        "indices": ArraySpec((-(-k // 16), -(-n // 16), 32 * codec.bits), np.dtype(np.uint8)),
        "scales": ArraySpec((codec.group_count(shape), n), f32),
        "su": ArraySpec((k,), f32),
        "sv": ArraySpec((n,), f32),
    }
    return parts | ({"lut": ArraySpec((1 << codec.window_bits,), f32)} if codec.codebook == "lut" else {})
