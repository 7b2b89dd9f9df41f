"""The single file that a split GGUF model becomes, as pieces that are copied in order: no tensor is held in memory.

Metadata of the first file without `split.*`, all tensors in order with new offsets, their bytes unchanged: the bytes of
the file that `convert` writes without --shard-size. A file that is not split is one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from polyquant.errors import InputError
from polyquant.formats.gguf.dialect import detect
from polyquant.formats.gguf.header import Header
from polyquant.formats.gguf.layout import encode_entry, encode_header, encode_key, encode_tensor
from polyquant.formats.gguf.place import Placed, place
from polyquant.formats.gguf.reading import headers
from polyquant.storage.pieces import Piece, Span

__all__ = ["joined"]


def joined(path: Path) -> list[Piece]:
    """Return the pieces of the model as one file. Raises InputError for broken files and files that contradict each
    other.
    """
    every = list(headers(path))
    first = every[0]
    found = [detect(header).name for header in every]
    dialect = next((name for name in found if name != "mainline"), found[0])
    placed = [_placed(header, dialect) for header in every]
    if len(every) == 1:
        return [Span(first.source, 0, first.source.size)]
    for header in every[1:]:
        if (header.order, header.alignment) != (first.order, first.alignment):
            raise InputError("has another byte order or alignment than the first file", file=header.source.path)
    infos, offset = [], 0
    names: set[str] = set()
    for header, tensors in zip(every, placed, strict=True):
        for p in tensors:
            if p.info.name in names:
                raise InputError(
                    "two files of this split model contain the same tensor", file=header.source.path, tensor=p.info.name
                )
            names.add(p.info.name)
            infos.append(encode_tensor(p.info.name, p.info.shape, p.info.type_id, offset, first.order))
            offset += -(-p.nbytes // first.alignment) * first.alignment
    entries = [_entry(first, key) for key in first.entries if not key.startswith("split.")]
    return [encode_header(infos, entries, first.alignment, first.order), *_data(every, placed)]


def _placed(header: Header, dialect: str) -> list[Placed]:
    """The tensors of a file without errors. Raises InputError."""
    tensors = place(header, dialect)
    if (error := header.findings.first_error()) is not None:
        raise InputError(
            error.message, file=header.source.path, tensor=error.tensor, hint=f"`polyquant explain {error.code}`"
        )
    return tensors


def _entry(header: Header, key: str) -> bytes:
    """The stored bytes of one key; those of version 1 have other lengths and are encoded again."""
    if not header.wide:
        return encode_entry(key, header.typed(key), header.order)
    kind = int(header.entries[key].kind).to_bytes(4, "little" if header.order == "<" else "big")
    return encode_key(key, header.order) + kind + header.value_bytes(key)


def _data(every: list[Header], placed: list[list[Placed]]) -> Iterator[Piece]:
    """Yield the bytes of each tensor, padded; runs of tensors without gaps are one span."""
    for header, tensors in zip(every, placed, strict=True):
        start = end = -1
        for p in tensors:
            at = header.data + p.info.offset
            if at != end:
                if end > start:
                    yield Span(header.source, start, end - start)
                start = at
            padded = -(-p.nbytes // header.alignment) * header.alignment
            end = at + padded
            if end > header.source.size:  # the last tensor of a file without padding
                yield Span(header.source, start, header.source.size - start)
                yield bytes(end - header.source.size)
                start = end
        if end > start:
            yield Span(header.source, start, end - start)
