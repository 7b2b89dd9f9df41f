"""tokenizer.model files, written by hand: protobuf with pieces, their scores and kinds."""

import struct


def varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def chunk(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def sentencepiece(entries: list[tuple[str, float, int]], model_type: int = 2, prefix: bool = True) -> bytes:
    out = b""
    for text, score, kind in entries:
        kind_field = varint(3 << 3) + varint(kind) if kind != 1 else b""
        out += chunk(1, chunk(1, text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score) + kind_field)
    return out + chunk(2, varint(3 << 3) + varint(model_type)) + chunk(3, varint(3 << 3) + varint(int(prefix)))
