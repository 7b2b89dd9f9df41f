"""Dialects: the program whose type numbers a GGUF file uses, and their meaning.

Type numbers from 34 on were assigned by several programs independently. They are distinguished by, in this order: the
offset chain (the distance between tensor offsets must equal the type's padded size), the architecture, numbers that
only one program has, and `general.file_type` (40 is I2_S in bitnet.cpp, Q1_0 in llama.cpp). The size of a whole-tensor
type (I2_S, TL1) with n weights is n / block * nbytes + tail bytes; TL2's size depends on a tiling that is not in the
file and is taken from the offset chain. Sources: ggml.h of llama.cpp 0c1e570, of the llama.cpp fork in microsoft/BitNet
16da220, of ik_llama.cpp 8337e4cd3; gHashTag/trinity af2d6c1bb.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polyquant.errors import UnknownNameError
from polyquant.formats.gguf.header import Header, TensorInfo
from polyquant.types import Evidence, Kind

__all__ = ["ACTIVATIONS", "DIALECTS", "TYPES", "GgufType", "chain", "detect", "number_of"]


@dataclass(frozen=True, slots=True)
class GgufType:
    """Sizes of a type: codec (None: known size, no codec), weights and bytes per block, tail bytes after a whole
    tensor.

    whole: blocks run over the whole tensor, not over rows. nbytes 0: the size is only known from the offset chain.
    """

    codec: str | None
    block: int
    nbytes: int
    tail: int = 0
    whole: bool = False

    def fits(self, info: TensorInfo) -> bool:
        """True if the block divides the rows (the tensor for a whole-tensor type)."""
        width = info.elements if self.whole else (info.shape[-1] if info.shape else 1)
        return width % self.block == 0

    def size(self, info: TensorInfo) -> int | None:
        """Bytes of a tensor, unpadded; None if only the offset chain shows it."""
        return info.elements // self.block * self.nbytes + self.tail if self.nbytes else None


def _types(text: str) -> dict[int, GgufType]:
    """Rows of `number codec block bytes`."""
    rows = (line.split() for line in text.strip().splitlines())
    return {int(i): GgufType(name, int(block), int(nbytes)) for i, name, block, nbytes in rows}


_SHARED = _types("""
    0 f32 1 4
    1 f16 1 2
    2 q4_0 32 18
    3 q4_1 32 20
    6 q5_0 32 22
    7 q5_1 32 24
    8 q8_0 32 34
    9 q8_1 32 36
    10 q2_k 256 84
    11 q3_k 256 110
    12 q4_k 256 144
    13 q5_k 256 176
    14 q6_k 256 210
    15 q8_k 256 292
    16 iq2_xxs 256 66
    17 iq2_xs 256 74
    18 iq3_xxs 256 98
    19 iq1_s 256 50
    20 iq4_nl 32 18
    21 iq3_s 256 110
    22 iq2_s 256 82
    23 iq4_xs 256 136
    24 i8 1 1
    25 i16 1 2
    26 i32 1 4
    27 i64 1 8
    28 f64 1 8
    29 iq1_m 256 56
    30 bf16 1 2
""")
_TERNARY = _types("""
    34 tq1_0 256 54
    35 tq2_0 256 66
""")
_FP4 = _types("39 mxfp4 32 17")
_I2_S = GgufType("i2_s.x86", 4, 1, 32, whole=True)

TYPES: Mapping[str, Mapping[int, GgufType]] = {
    "mainline": {**_SHARED, **_TERNARY, **_FP4, **_types("40 nvfp4 64 36\n41 q1_0 128 18\n42 q2_0 64 18")},
    "bitnet": {
        **_SHARED, **_TERNARY,
        36: _I2_S,
        38: GgufType("tl1", 4, 1, 32, whole=True),
        39: GgufType("tl2", 1, 0, whole=True),
    },
    "ik_llama": {**_SHARED, **_FP4, 36: _I2_S, 41: GgufType("q1_0", 128, 18)},
    "trinity": {  # its TQ1_0, I2_S, TL1 and TL2 are the same two-bit codes without a scale
        **_SHARED,
        34: GgufType("trinity.i2_s", 32, 8), 35: GgufType("trinity.tq2_0", 32, 10),
        **dict.fromkeys((36, 38, 39), GgufType("trinity.i2_s", 4, 1, whole=True)),
    },
}  # fmt: skip
"""Dialect -> type number -> meaning."""

DIALECTS = tuple(TYPES)

WRITTEN_AS: Mapping[str, int] = {
    **{t.codec: i for i, t in TYPES["mainline"].items() if t.codec},
    "i2_s.x86": 36, "i2_s.arm": 36, "i2_s.x4": 36, "trinity.i2_s": 36, "trinity.tq2_0": 35, "tl1": 38, "tl2": 39,
}  # fmt: skip
"""Codec name -> the type number to write."""


def number_of(codec: str) -> int | None:
    """The type number of a codec, whose scales may be separate tensors; None if GGUF has none."""
    return WRITTEN_AS.get(codec.partition(".scaled")[0])


ACTIVATIONS = ("q8_1", "q8_k")
"""Types to which llama.cpp rounds activations. It has no kernels for such weights, so they are not written."""

_IK_ONLY = frozenset({*range(97, 100), *range(133, 159), *range(202, 400)})
_CONTESTED = frozenset(range(34, 43))
_BITNET_FILE_TYPES = {38, 39, 40}  # TL1, TL2, I2_S


def chain(header: Header) -> list[int | None]:
    """Bytes from each tensor's offset to the next, for the last to the end of the file. None if offsets decrease."""
    offsets = [t.offset for t in header.tensors]
    ends = [*offsets[1:], header.source.size - header.data][: len(offsets)]
    return [end - start if end >= start else None for start, end in zip(offsets, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class _Score:
    """The fit of one dialect to a file: tensors whose size contradicts it, is unknown in it, agrees with it."""

    contradicted: int
    unknown: int
    explained: int


def _score(header: Header, gaps: list[int | None], types: Mapping[int, GgufType]) -> _Score:
    contradicted = unknown = explained = 0
    last = len(gaps) - 1
    for i, (info, gap) in enumerate(zip(header.tensors, gaps, strict=True)):
        meaning = types.get(info.type_id)
        if meaning is None:
            unknown += 1
            continue
        size = meaning.size(info) if meaning.fits(info) else -1
        if size is None:
            continue
        padded = -(-size // header.alignment) * header.alignment
        # The last tensor may lack padding or be followed by other bytes: only too little space contradicts a dialect.
        if size >= 0 and gap is not None and (gap == padded or (i == last and gap >= size)):
            explained += 1
        else:
            contradicted += 1
    return _Score(contradicted, unknown, explained)


def _text(header: Header, key: str) -> str:
    """A string value, decoded leniently; "" if there is none."""
    entry = header.entries.get(key)
    raw = header.value_bytes(key) if entry is not None and entry.kind is Kind.STRING else b""
    return raw[8 if header.wide else 4 :].decode(errors="replace")


def _number(header: Header, key: str) -> int | None:
    entry = header.entries.get(key)
    return int(header.typed(key).value) if entry is not None and entry.kind in (Kind.UINT32, Kind.INT32) else None


def _choose(header: Header, candidates: list[str], ids: set[int]) -> Evidence:
    """Choose among dialects that fit equally well."""
    if ids & _IK_ONLY and "ik_llama" in candidates:
        return Evidence("ik_llama", f"only ik_llama.cpp has type {min(ids & _IK_ONLY)}")
    special = sorted(ids & _CONTESTED) or sorted(ids)
    meanings: dict[tuple[GgufType | None, ...], str] = {}
    for name in candidates:
        meanings.setdefault(tuple(TYPES[name].get(i) for i in special), name)
    distinct = list(meanings.values())
    if len(distinct) == 1:
        return Evidence(distinct[0], f"the sizes of its tensors of type {special[-1]} match")
    if "bitnet" in distinct:
        if (architecture := _text(header, "general.architecture")).startswith("bitnet"):
            return Evidence("bitnet", f"the architecture is {architecture}")
        if ids & {37, 38}:
            return Evidence("bitnet", f"only bitnet.cpp has type {min(ids & {37, 38})}")
        if 36 in ids and _number(header, "general.file_type") in _BITNET_FILE_TYPES:
            return Evidence("bitnet", "general.file_type is one of bitnet.cpp's")
    return Evidence(distinct[0], "the sizes fit several dialects; the most common one is assumed")


def detect(header: Header, requested: str | None = None) -> Evidence:
    """Detect the dialect of a file. Raises UnknownNameError if `requested` is unknown."""
    if requested is not None:
        if requested not in TYPES:
            raise UnknownNameError("dialect", requested, DIALECTS)
        return Evidence(requested, "as requested")
    ids = {t.type_id for t in header.tensors}
    if not ids & (_CONTESTED | _IK_ONLY):
        return Evidence("mainline", "all its type numbers are common to all dialects")
    gaps = chain(header)
    scores = {name: _score(header, gaps, types) for name, types in TYPES.items()}
    best = min(scores.values(), key=lambda s: (s.contradicted, s.unknown, -s.explained))
    return _choose(header, [name for name, s in scores.items() if s == best], ids)
