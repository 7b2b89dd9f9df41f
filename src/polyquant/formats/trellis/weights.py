"""Make one quantized weight from its components: check sizes, then find codec and parts.

    indices: T * 32 k bytes      only tiles, T = ceil(K / 16) * ceil(N / 16)
             T * 32 k + 1        one header byte (= k) before all of them
             T * (32 k + 1)      one before each

so k and the headers follow from the size. N and K are the lengths of sv and su in every dialect; the axes ("kn": tiles
and shape are [K, N] as documented, "nk": [N, K] as in Metal Marlin's code) follow from the shape of the tiles or of the
metadata unless both are square.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from polyquant.codecs.metal_marlin import MetalMarlin
from polyquant.codecs.trellis import Trellis
from polyquant.errors import CodecError, InputError
from polyquant.formats.breach import Breach
from polyquant.formats.stored import Stored
from polyquant.formats.trellis.arrays import HeadedTiles, RepairedScales
from polyquant.formats.trellis.metadata import GRID, Codebook, Metadata, TensorNote
from polyquant.ops.trellis import CODEBOOKS, GRID_STEP, TILE_ORDERS
from polyquant.storage.source import FileArray
from polyquant.types import ArraySpec, Codec, StoredArray, Weight

__all__ = ["COMPONENTS", "Axes", "Facts", "Stored", "examine", "weight_of"]

Axes = Literal["kn", "nk"]
COMPONENTS = ("indices", "scales", "su", "sv")
ROTATED = 128
"""Hadamard block size of Metal Marlin's rotated variant, along K."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties derived from a weight's components.

    headers: none, one ("tensor") or one per tile; axes: None if ambiguous.
    """

    name: str
    n: int
    k: int
    bits: int
    headers: Literal["none", "tensor", "tile"]
    axes: Axes | None
    groups: int
    components: Mapping[str, Stored]
    codebook: Codebook | None

    @property
    def square(self) -> bool:
        """True for N = K, where Metal Marlin swaps the signs."""
        return self.n == self.k

    @property
    def tiles(self) -> int:
        """Tiles of 16 x 16 codes."""
        return -(-self.k // 16) * -(-self.n // 16)

    @property
    def flat(self) -> bool:
        """True for one-dimensional indices, where only the size shows header bytes."""
        return len(self.components["indices"].entry.shape) == 1

    @property
    def file(self) -> Path:
        """The file of the indices."""
        return self.components["indices"].source.path


def examine(name: str, components: Mapping[str, Stored], metadata: Metadata) -> Facts | list[Breach]:
    """The facts, or the violations of the components. Reads at most one byte, the header."""
    file = next(iter(components.values())).source.path
    problems = list(_unfit(name, components, file))
    if problems:
        return problems
    n, k = components["sv"].entry.shape[0], components["su"].entry.shape[0]
    note, codebook = metadata.notes.get(name), metadata.codebook_of(name)
    sized = _sizes(name, components, n, k, note)
    if isinstance(sized, Breach):
        return [sized]
    bits, headers = sized
    axes, wrong = _axes(name, components["indices"], n, k, note)
    problems = [wrong] if wrong else []
    problems += _bits(name, components["indices"], bits, headers, note, codebook)
    problems += _codebook(name, file, bits, codebook, components)
    if codebook is not None and codebook != GRID and axes == "nk":
        problems.append(Breach("TRL034", "a codebook requires the axes [K, N]", file, name, [k, n], [n, k]))
    if problems:
        return problems
    groups = components["scales"].entry.shape[0]
    facts = Facts(name, n, k, bits, headers, axes, groups, components, codebook)
    if codebook is not None:
        try:
            _codec(facts, axes or "kn", metadata, 1).specs((n, k))
        except CodecError as e:
            at = note.file if note is not None else file
            return [Breach("TRL037", e.message, at, name, e.expected, e.found)]
    return facts


def _unfit(name: str, components: Mapping[str, Stored], file: Path) -> Iterator[Breach]:
    """Violations: missing components, wrong dtypes and dimensions."""
    for part in COMPONENTS:
        if part not in components:
            present = ", ".join(components)
            yield Breach("TRL020", f"component '{part}' is missing", file, name, "indices, scales, su, sv", present)
    for part, stored in components.items():
        dtype = "U8" if part == "indices" else "F32"
        if stored.entry.dtype != dtype:
            yield Breach("TRL021", f"component '{part}' has the wrong dtype", file, name, dtype, stored.entry.dtype)
    shapes = {part: s.entry.shape for part, s in components.items()}
    for part, ranks in (("indices", (1, 3)), ("scales", (2,)), ("su", (1,)), ("sv", (1,)), ("lut", (1,))):
        if part in shapes and (len(shapes[part]) not in ranks or 0 in shapes[part]):
            expected = " or ".join(f"{r} dimensions" for r in ranks)
            yield Breach("TRL022", f"component '{part}' has the wrong shape", file, name, expected, list(shapes[part]))
            return
    if not set(COMPONENTS) <= set(shapes):
        return
    n, k = shapes["sv"][0], shapes["su"][0]
    groups, columns = shapes["scales"]
    if columns != n or groups > k:
        expected = f"[1 to {k}, {n}] for sv [{n}]"
        yield Breach("TRL022", "component 'scales' has the wrong shape", file, name, expected, [groups, columns])


def _sizes(
    name: str, components: Mapping[str, Stored], n: int, k: int, note: TensorNote | None
) -> tuple[int, Literal["none", "tensor", "tile"]] | Breach:
    indices = components["indices"]
    tiles, nbytes = -(-k // 16) * -(-n // 16), indices.entry.nbytes
    if nbytes % (32 * tiles) == 0:
        return nbytes // (32 * tiles), "none"
    if (nbytes - 1) % (32 * tiles) == 0 and len(indices.entry.shape) == 1:
        return (nbytes - 1) // (32 * tiles), "tensor"
    if nbytes % tiles == 0 and (nbytes // tiles - 1) % 32 == 0:
        return (nbytes // tiles - 1) // 32, "tile"
    size = f"{32 * tiles * note.bits}" if note is not None and note.bits else f"{32 * tiles} * bits"
    expected = f"{size} bytes for {tiles} tiles of [{k}, {n}]"
    return Breach("TRL022", "component 'indices' has the wrong size", indices.source.path, name, expected, nbytes)


def _axes(
    name: str, indices: Stored, n: int, k: int, note: TensorNote | None
) -> tuple[Axes | None, Breach | None]:  # fmt: skip
    """The axes if unambiguous, and a contradiction if there is one."""
    shape = indices.entry.shape
    tiled: Axes | None = None
    if len(shape) == 3:
        tiles_k, tiles_n = -(-k // 16), -(-n // 16)
        if shape[:2] not in ((tiles_k, tiles_n), (tiles_n, tiles_k)):
            expected = f"[{tiles_k}, {tiles_n}, ...]"
            return None, Breach(
                "TRL022", "component 'indices' has the wrong shape", indices.source.path, name, expected, list(shape)
            )
        if tiles_k != tiles_n:
            tiled = "kn" if shape[0] == tiles_k else "nk"
    if note is None or note.shape is None:
        return tiled, None
    if note.shape not in ((k, n), (n, k)):
        expected = f"[{k}, {n}], the lengths of su and sv"
        return None, Breach(
            "TRL034", "the shape in the metadata does not match", note.file, name, expected, list(note.shape)
        )
    stated: Axes | None = None if n == k else "kn" if note.shape == (k, n) else "nk"
    if tiled and stated and tiled != stated:
        return None, Breach(
            "TRL034", "the shape in the metadata contradicts the tiles", note.file, name, list(shape), list(note.shape)
        )
    return tiled or stated, None


def _bits(
    name: str, indices: Stored, bits: int, headers: str, note: TensorNote | None, codebook: Codebook | None
) -> Iterator[Breach]:
    """Violations: bits out of range, and headers or metadata that contradict the size."""
    path = indices.source.path
    least = 1 if codebook is not None and codebook.tile_order == "exl3" else 2
    if not least <= bits <= 8:
        yield Breach("TRL023", "bits are out of range", path, name, f"{least} to 8", bits)
        return
    if note is not None and note.bits is not None and note.bits != bits:
        code = "TRL024" if 2 <= note.bits <= 8 else "TRL023"
        yield Breach(
            code, "the bits in the metadata contradict the size of the indices", note.file, name, bits, note.bits
        )
    if headers != "none":
        header = int(indices.source.pread(indices.entry.offset, 1)[0])
        if header != bits:
            yield Breach("TRL024", "the header byte contradicts the size of the indices", path, name, bits, header)


def _codebook(
    name: str, file: Path, bits: int, codebook: Codebook | None, components: Mapping[str, Stored]
) -> Iterator[Breach]:
    if codebook is None:
        return
    window = codebook.window_bits if codebook.window_bits is not None else bits
    if codebook.type not in CODEBOOKS:
        yield Breach("TRL037", "unknown codebook", file, name, ", ".join(CODEBOOKS), codebook.type)
    elif codebook.tile_order not in TILE_ORDERS:
        yield Breach("TRL037", "unknown tile order", file, name, ", ".join(TILE_ORDERS), codebook.tile_order)
    elif codebook.type != "grid" and not bits <= window <= 16:
        yield Breach("TRL037", "window_bits are out of range", file, name, f"{bits} to 16", window)
    elif codebook.type == "lut" and "lut" not in components:
        yield Breach("TRL020", "component 'lut' is missing", file, name, f"float32 [{1 << window}]")
    elif codebook.type == "lut" and components["lut"].entry.shape != (1 << window,):
        shape = list(components["lut"].entry.shape)
        yield Breach("TRL022", "component 'lut' has the wrong shape", file, name, [1 << window], shape)


# ---------------------------------------------------------------- codec and parts


def weight_of(facts: Facts, axes: Axes, metadata: Metadata, *, repair: bool = False) -> Weight:
    """Make the weight [N, K]. repair: as its quantizer intended, if Metal Marlin's decoder differs.

    Raises InputError if its rotation does not fit its shape, or if the requested axes do not fit its tiles.
    """
    arrays: dict[str, StoredArray] = {}
    shape = (facts.n, facts.k)
    repairing = repair and facts.codebook is None
    rotated = repairing and _has_signs(facts)
    if rotated and facts.k % ROTATED:
        raise InputError(
            "cannot be repaired: Metal Marlin rotates blocks of 128 inputs",
            file=facts.file,
            tensor=facts.name,
            found=f"K = {facts.k}",
        )
    try:
        codec = _codec(facts, axes, metadata, ROTATED if rotated else 1)
        specs = codec.specs(shape)
    except CodecError as e:
        raise InputError(e.message, file=facts.file, tensor=facts.name, expected=e.expected, found=e.found) from None
    tiles = facts.components["indices"].entry.shape
    if len(tiles) == 3 and tiles[:2] != specs["indices"].shape[:2]:
        expected = list(specs["indices"].shape[:2])
        raise InputError(
            "the tiles do not have these axes",
            file=facts.file,
            tensor=facts.name,
            expected=expected,
            found=list(tiles[:2]),
        )
    for part, spec in specs.items():
        stored = facts.components[part]
        if part == "indices":
            arrays[part] = _indices(stored, facts.headers, spec)
        else:
            arrays[part] = FileArray(stored.source, stored.entry.offset, spec)
    if repairing:
        arrays["scales"] = RepairedScales(arrays["scales"], GRID_STEP if rotated else np.float32(1))
        if (
            facts.square and axes == "nk" and not rotated
        ):  # the codec swaps them as the decoder does, but the quantizer did not
            arrays["su"], arrays["sv"] = arrays["sv"], arrays["su"]
    return Weight(facts.name, shape, codec, arrays)


def _codec(facts: Facts, axes: Axes, metadata: Metadata, block: int) -> Codec:
    shape = (facts.n, facts.k)
    if axes == "nk":
        marlin = MetalMarlin(facts.bits, block)
        usual = marlin.specs(shape)["scales"].shape[0]
        return marlin if facts.groups == usual else marlin.configure(groups=facts.groups)
    book = facts.codebook or GRID
    note = metadata.notes.get(facts.name)
    hadamard: bool | tuple[int, int] = facts.codebook is not None and metadata.rotated
    if block > 1:
        hadamard = (block, 1)
    elif note is not None and note.blocks is not None and facts.codebook is not None:
        hadamard = note.blocks if note.blocks != (1, 1) else False
    options: dict[str, Any] = {} if book.type == "grid" else {"window_bits": book.window_bits}
    options |= {"codebook": book.type, "tile_order": book.tile_order, "hadamard": hadamard}
    codec = Trellis(facts.bits).configure(**options)
    if isinstance(hadamard, tuple):
        codec.blocks(shape)
        largest = codec.configure(hadamard=True)
        if largest.blocks(shape) == hadamard:
            codec = largest
    return codec if facts.groups == codec.group_count(shape) else codec.configure(groups=facts.groups)


def _indices(stored: Stored, headers: str, spec: ArraySpec) -> StoredArray:
    if headers == "tile":
        return HeadedTiles(stored.source, stored.entry.offset, spec)
    return FileArray(stored.source, stored.entry.offset + (headers == "tensor"), spec)


def _has_signs(facts: Facts) -> bool:
    """True if su is not all ones: only Metal Marlin's rotated variant has signs. Reads su."""
    stored = facts.components["su"]
    su = FileArray(stored.source, stored.entry.offset, ArraySpec((facts.k,), np.dtype(np.float32))).read(0, facts.k)
    return bool((su != 1).any())
