"""The tensors of the BitNet vectors, from a minimal reader that knows only offsets, as a reference for codecs."""

from __future__ import annotations

import json
import struct

import ml_dtypes
import numpy as np

from golden import VECTORS

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
FOLDER = VECTORS / "bitnet_gguf"


def gguf_tensors(name: str) -> dict[str, tuple[tuple[int, ...], int, np.ndarray]]:
    """name -> (shape, type number, bytes up to the next tensor)."""
    data = (FOLDER / name).read_bytes()
    at = 24

    def take(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize(form)
        return value

    def skip(kind: int) -> None:
        nonlocal at
        if kind == 8:
            text()
        elif kind == 9:
            item, count = take("I"), take("Q")
            for _ in range(count):
                skip(item)
        else:
            at += SIZES[kind]

    def text() -> str:
        nonlocal at
        size = take("Q")
        at += size
        return data[at - size : at].decode()

    tensors, pairs = struct.unpack_from("<QQ", data, 8)
    for _ in range(pairs):
        text()
        skip(take("I"))
    found = [(text(), tuple(take("Q") for _ in range(take("I"))), take("I"), take("Q")) for _ in range(tensors)]
    start = -(-at // 32) * 32
    offsets = sorted(offset for *_, offset in found)
    next_offset = dict(zip(offsets, [*offsets[1:], len(data) - start], strict=True))
    return {
        n: (shape[::-1], kind, np.frombuffer(data[start + o : start + next_offset[o]], np.uint8))
        for n, shape, kind, o in found
    }


def hf_parts(folder: str) -> dict[str, dict[str, np.ndarray]]:
    """Module name -> {"weight", "weight_scale"} of the packed linears of a vector folder."""
    raw = (FOLDER / folder / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    dtypes = {"U8": np.uint8, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
    arrays = {
        k: np.frombuffer(raw[8 + size :][slice(*v["data_offsets"])], dtypes[v["dtype"]]).reshape(v["shape"])
        for k, v in header.items()
        if k != "__metadata__"
    }
    stems = [k.removesuffix(".weight_scale") for k in arrays if k.endswith(".weight_scale")]
    return {s: {"weight": arrays[s + ".weight"], "weight_scale": arrays[s + ".weight_scale"]} for s in stems}
