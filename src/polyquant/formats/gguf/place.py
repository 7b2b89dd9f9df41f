"""Locate each tensor's bytes: sizes from the dialect, offsets checked against the padded running sum and the file."""

from __future__ import annotations

from dataclasses import dataclass

from polyquant.formats.gguf.dialect import TYPES, GgufType, chain
from polyquant.formats.gguf.header import Header, TensorInfo

__all__ = ["Placed", "place"]


@dataclass(frozen=True, slots=True)
class Placed:
    """One tensor: its entry, its type in the dialect (None: unknown), its size in bytes."""

    info: TensorInfo
    meaning: GgufType | None
    nbytes: int


def place(header: Header, dialect: str) -> list[Placed]:
    """Every tensor with its size, in file order; violations go to header.findings."""
    findings, types, align = header.findings, TYPES[dialect], header.alignment
    room = header.source.size - header.data
    placed, expected = [], 0
    for info, gap in zip(header.tensors, chain(header), strict=True):
        meaning = types.get(info.type_id)
        size = None
        if meaning is None or meaning.codec is None:
            findings.warning("GGUF023", f"type {info.type_id} is unknown in the {dialect} dialect", info.name)
        if meaning is not None:
            if not meaning.fits(info):
                unit = "weights" if meaning.whole else "rows"
                findings.error(
                    "GGUF017",
                    f"{unit} of shape {list(info.shape)} are not a multiple of {meaning.block}, the block of "
                    f"{meaning.codec}",
                    info.name,
                )
            size = meaning.size(info)
        if size is None:  # known only from the next offset or the end of the file
            size = gap if gap is not None else 0
        if info.offset != expected:
            code = "GGUF019" if info.offset < expected else "GGUF018"
            what = "overlaps the tensor before it" if info.offset < expected else "does not follow the tensor before it"
            findings.error(code, f"data at offset {info.offset} {what} (expected {expected})", info.name)
        if info.offset + size > room:
            findings.error(
                "GGUF020",
                f"data of {size} bytes at offset {info.offset}, but the file has {max(0, room)} bytes of data",
                info.name,
            )
        placed.append(Placed(info, meaning, size))
        expected = max(expected, -(-(info.offset + size) // align) * align)
    if placed and room > expected:
        findings.warning("GGUF021", f"{room - expected} bytes after the last tensor")
    elif placed and room < expected and room >= placed[-1].info.offset + placed[-1].nbytes:
        findings.warning("GGUF022", f"the last tensor lacks {expected - room} bytes of padding")
    return placed
