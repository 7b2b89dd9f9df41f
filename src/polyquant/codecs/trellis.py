"""Trellis-coded weights: tiles of 16 x 16, k bits a weight, as Trellis v3 stores them.

    indices u8 [ceil(K / 16), ceil(N / 16), 32 k]   one tile of W^T after the other: 256 codes of k bits, a circular stream (ops/trellis.py)
    scales  f32 [G, N]                              one row for each ceil(K / G) inputs
    su      f32 [K]      sv f32 [N]                 signs, or signs times a scale of the channel
    lut     f32 [2 ** L]                            the codebook "lut" alone

    W^T = diag(su) . H_K . (scales * numbers) . H_N . diag(sv)          H: orthonormal, in blocks (ops/hadamard.py); the identity without rotation

Bits per weight: k + 32 (G / K + 1 / N + 1 / K). In a tile of row-major order number 16 i + o belongs to input i and output o; tiles that K or N do not
fill end in numbers that nothing reads.

Codebook "grid" has L = k and is what files without a codebook mean. Unrotated, each weight is ((number * scale) * sv) * su in float32, rounded to
half precision: the decoder of Metal Marlin. Sources: QTIP (arXiv 2406.11235), EXL3, Metal Marlin; where they disagree: docs/formats/trellis.md.

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
from polyquant.codecs.arguments import column_weights, exact_part, finite, output, real, stored_bytes
from polyquant.errors import CodecError, UnknownNameError
from polyquant.ops import matmul, native
from polyquant.ops import trellis as ops
from polyquant.ops.hadamard import LARGEST_BLOCK, block_size, hadamard
from polyquant.registry import Search
from polyquant.types import F32, ArraySpec, Parts, Rounding, Shape, TrellisCode, TrellisCodes, as_matrix

__all__ = ["NAMES",
    "TRELLIS_2", "TRELLIS_3", "TRELLIS_4", "TRELLIS_5", "TRELLIS_6", "TRELLIS_7", "TRELLIS_8", "Trellis", "TrellisSearch", "from_tiles", "numbers", "restore", "trellis_named",
]  # fmt: skip

GROUP = 128
"""Inputs that share a scale where nothing is rotated."""
NAMES: tuple[str, ...] = (
    *(f"trellis.{b}" for b in range(2, 9)),
    "trellis.3.mul1.16",
    "trellis.3.mul1.14.flat",
    "trellis.3.grid",
)
"""Usual members of the family, for errors that say which names are near."""


class TrellisSearch(Protocol):
    """What finds the codes and scales of a weight."""

    def __call__(
        self, codec: Trellis, w: F32, *, importance: F32 | None, hessian: F32 | None, book: F32
    ) -> TrellisCodes:
        """w: finite, [N, K], N at least 1. importance: [K]; hessian: [K, K]; book: the codebook, float32 [2 ** window_bits]. Codes without a table."""


@dataclass(frozen=True, slots=True, eq=False)
class Trellis:
    """hadamard: True for the largest blocks that fit each axis, False for none, or the two block sizes (along K, along N).

    groups: rows of `scales`; None for 1 where rotated, else one for each 128 inputs. search: what finds codes; the bytes mean the same for any.
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
        """Says everything that the bytes mean."""
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
        """Codes of tiles."""
        return TrellisCodes

    @property
    def granule(self) -> tuple[int, int]:
        """Any shape."""
        return 1, 1

    @property
    def row_sliced(self) -> bool:
        """Tiles hold 16 outputs each, and a rotation mixes them."""
        return False

    def configure(self, **options: Any) -> Trellis:
        """codebook, window_bits, hadamard, groups, tile_order, search. The codebook "grid" has window_bits = bits and is not rotated unless asked for.

        Raises TypeError for an option it does not have, CodecError for a value that makes no codec.
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
                "no such trellis", expected=f"window_bits from {self.bits} to {largest}", found=f"{self.window_bits!r}"
            )
        if self.tile_order not in ops.TILE_ORDERS:
            raise UnknownNameError("tile order", self.tile_order, ops.TILE_ORDERS)
        if self.groups is not None and self.groups < 1:
            raise CodecError("a weight has at least one group of scales", found=self.groups)
        blocks = self.hadamard if isinstance(self.hadamard, tuple) else ()
        if any(b < 1 or b & (b - 1) or b > LARGEST_BLOCK for b in blocks):
            raise CodecError(f"Hadamard blocks are powers of two up to {LARGEST_BLOCK}", found=blocks)
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
        """What the codes of a weight of this shape mean."""
        return TrellisCode(self.bits, self.codebook, self.window_bits, self.tile_order, self.blocks(shape))

    def group_count(self, shape: Shape) -> int:
        """Rows of `scales`."""
        _, k = as_matrix(shape)
        if self.groups is not None:
            return self.groups
        return 1 if self.hadamard is not False else -(-k // GROUP)

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Sizes of the parts of a weight [N, K]. Raises CodecError for blocks that do not divide it."""
        return dict(_specs(self, shape))

    def cut(self, shape: Shape, index: int) -> tuple[Trellis, dict[str, Cut]]:
        """Matrix `index` of a stack: its columns of tiles, of scales and of sv; su is everyone's.

        Raises CodecError where a tile of 16 outputs, or a block of the rotation along N, holds rows of two matrices.
        """
        n, k = shape[-2:]
        blocks = self.blocks(shape)
        if n % 16 or n % blocks[1]:
            what = "a tile of 16 outputs holds" if n % 16 else f"the rotation of {blocks[1]} outputs mixes"
            raise CodecError(
                f"{self.name} cannot be taken apart here: {what} rows of two matrices", found=f"matrices {[n, k]}"
            )
        codec = self if self.blocks((n, k)) == blocks else replace(self, hadamard=blocks)
        own, tiles = slice(index * n, (index + 1) * n), slice(index * n // 16, (index + 1) * n // 16)
        cuts = {"indices": Cut((tiles,), 1), "scales": Cut((own,), 1), "su": Cut((slice(0, k),)), "sv": Cut((own,))}
        return codec, cuts | ({"lut": Cut((slice(0, 1 << self.window_bits),))} if self.codebook == "lut" else {})

    # ------------------------------------------------------------ layout

    def pack(self, codes: TrellisCodes) -> dict[str, NDArray[Any]]:
        """Codes to parts. Raises CodecError if they mean something else than this codec's."""
        shape = (len(codes.sv), len(codes.su))
        if codes.code != self.code(shape) or codes.scales.shape != (self.group_count(shape), shape[0]):
            raise CodecError(f"codes that are not {self.name}'s", expected=self.code(shape), found=codes.code)
        parts: dict[str, NDArray[Any]] = {
            "indices": ops.pack_bits(codes.codes, self.bits),
            "scales": np.asarray(codes.scales, np.float32),
            "su": np.asarray(codes.su, np.float32),
            "sv": np.asarray(codes.sv, np.float32),
        }
        return parts if codes.table is None else {**parts, "lut": codes.table}

    def unpack(self, parts: Parts, shape: Shape) -> TrellisCodes:
        """Parts to codes. Raises CodecError if a part does not fit."""
        specs = self.specs(shape)
        packed = stored_bytes(self.name, parts, "indices", specs["indices"]).reshape(specs["indices"].shape)
        floats = {key: exact_part(parts, key, spec) for key, spec in specs.items() if key != "indices"}
        codes = ops.unpack_bits(packed, self.bits)
        return TrellisCodes(
            self.code(shape), codes, floats["scales"], floats["su"], floats["sv"], floats.get("lut")
        )  # fmt: skip

    # ------------------------------------------------------------ math

    def table(self, parts: Parts) -> F32:
        """The codebook, float32 [2 ** window_bits]."""
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
        """Floats [N, K] to the codes and scales of least error: of the weight, or of what it gives for inputs of this Hessian (mean of x x^T, [K, K]).

        importance: float32 [K], the Hessian's diagonal where no more is known. table: float32 [2 ** window_bits], the codebook "lut".
        Raises CodecError for what is no matrix of finite numbers, numpy.linalg.LinAlgError for a Hessian that is not positive definite.
        """
        floats = real(self.name, w)
        shape = as_matrix(floats.shape)
        specs = self.specs(shape)
        target = finite(self.name, floats).reshape(shape)
        if (table is None) != (self.codebook != "lut"):
            raise CodecError("the codebook 'lut' needs a table, and no other does", found=self.codebook)
        book = ops.codebook(self.codebook, self.window_bits) if table is None else np.asarray(table, np.float32)
        n, k = shape
        weights = column_weights(importance, k)
        h = None if hessian is None else np.asarray(hessian, np.float32)
        if h is not None and h.shape != (k, k):
            raise CodecError("the Hessian is not this weight's", expected=[k, k], found=list(h.shape))
        if n == 0:
            empty = {key: np.zeros(spec.shape, np.float32) for key, spec in specs.items() if key != "indices"}
            codes = np.zeros((*specs["indices"].shape[:2], ops.TILE), np.uint8)
            return TrellisCodes(self.code(shape), codes, empty["scales"], empty["su"], empty["sv"], table)
        return replace(self.search(self, target, importance=weights, hessian=h, book=book), table=table)

    def quantize_for(self, w: ArrayLike, hessian: ArrayLike) -> TrellisCodes:
        """Floats [N, K] to the codes of least error on inputs of this Hessian, [K, K]. Raises what `quantize` raises."""
        return self.quantize(w, hessian=hessian)

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts to float32 [N, K]; of `rows` all are decoded, since the rotation mixes them."""
        if rows is not None:
            chosen = self.dequantize(parts, as_matrix(shape))[rows]
            result = output(out, chosen.shape)
            result.reshape(chosen.shape)[...] = chosen
            return result
        result = output(out, shape)
        matrix = as_matrix(shape)
        handle = self._handle(parts, shape) if native.lib() is not None and matrix[0] else None
        if handle is not None:
            handle.dequantize(result.reshape(matrix))
        else:
            codes = self.unpack(parts, shape)
            result.reshape(matrix)[...] = restore(numbers(codes, self.table(parts)), codes)
        return result

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """A handle for multiplication (ops/matmul.py); None where groups of scales are no multiples of 128 inputs."""
        groups, (_, k) = self.group_count(shape), as_matrix(shape)
        if groups > 1 and -(-k // groups) % GROUP:
            return None
        return self._handle(parts, shape)

    def _handle(self, parts: Parts, shape: Shape) -> Any:
        specs = self.specs(shape)
        tiles = stored_bytes(self.name, parts, "indices", specs["indices"])
        table = self.table(parts)
        book = self.codebook
        levels = ops.fractions(table) if book == "lut" else ops.whole_levels(book, self.window_bits)
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
        """x [T, K] -> x W^T [T, N]: the reference of the packed kernel. The input is rounded after its rotation, 128 numbers with one scale."""
        if rounding == "none":
            return np.asarray(x @ self.dequantize(parts, shape).T, np.float32)
        codes, blocks = self.unpack(parts, shape), self.blocks(shape)
        levels, step, zero = (
            ops.fractions(self.table(parts))
            if codes.table is not None
            else ops.whole_levels(self.codebook, self.window_bits)
        )
        found = from_tiles(
            levels[ops.states(codes.codes, self.bits, self.window_bits)], (shape[1], shape[0]), self.tile_order
        ).astype(np.float32) * np.float32(step) + np.float32(zero)
        span = -(-shape[1] // len(codes.scales))
        inner = found * codes.scales[np.arange(shape[1]) // span]
        rounded = matmul.round_activations(hadamard(x * codes.su, blocks[0]), "wide")
        return np.asarray(hadamard(rounded @ inner, blocks[1]) * codes.sv, np.float32)


def from_tiles(tiles: NDArray[Any], shape: tuple[int, int], tile_order: str) -> NDArray[Any]:
    """The inverse: [tiles_k, tiles_n, 256] in stream order -> [K, N]."""
    rows, columns = tiles.shape[:2]
    if tile_order != "row_major":
        placed = np.empty_like(tiles)
        placed[..., ops.TILE_ORDERS[tile_order]] = tiles
        tiles = placed
    full = tiles.reshape(rows, columns, 16, 16).transpose(0, 2, 1, 3).reshape(16 * rows, 16 * columns)
    return full[: shape[0], : shape[1]]


def numbers(codes: TrellisCodes, table: F32) -> F32:
    """The codebook's numbers of a weight, before scales: [K, N]."""
    values = ops.decode(codes.codes, codes.code.bits, codes.code.window_bits, table)
    return from_tiles(values, (len(codes.su), len(codes.sv)), codes.code.tile_order)


def restore(values: F32, codes: TrellisCodes) -> F32:
    """Numbers [K, N] -> the weight [N, K]: scales, rotations, su and sv."""
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
    turned = hadamard(np.ascontiguousarray(rotated.T), block_n)  # [K, N]
    return np.ascontiguousarray(turned.T) * codes.sv[:, None] * codes.su


def trellis_named(name: str) -> Trellis:
    """The codec of a name, the inverse of `Trellis.name`. Raises UnknownNameError."""
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
    """See Trellis.specs: plans ask for those of 70,000 experts of a few shapes."""
    n, k = as_matrix(shape)
    if k == 0:
        raise CodecError(f"{codec.name} needs at least one column", found=f"shape {list(shape)}")
    codec.blocks(shape)
    if codec.group_count(shape) > k:
        raise CodecError("more groups of scales than inputs", expected=f"at most {k}", found=codec.group_count(shape))
    f32 = np.dtype(np.float32)
    found = {
        "indices": ArraySpec((-(-k // 16), -(-n // 16), 32 * codec.bits), np.dtype(np.uint8)),
        "scales": ArraySpec((codec.group_count(shape), n), f32),
        "su": ArraySpec((k,), f32),
        "sv": ArraySpec((n,), f32),
    }
    return found | ({"lut": ArraySpec((1 << codec.window_bits,), f32)} if codec.codebook == "lut" else {})
