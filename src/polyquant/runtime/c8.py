"""msModelSlim's int8 cache of keys and values: per-channel grids, calibrated in advance and stored with the weights.

    X.k_proj.kv_cache_scale  X.k_proj.kv_cache_offset  (and v_proj)   [kv_heads * head_size]   x = (q - offset) * scale

The current tool measures keys as they are cached, after RoPE: those are cached as int8 here too. Its older quantizer
measures the outputs of the linear layers, before RoPE: keys and values are rounded there and cached as floats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from polyquant.architectures.hyper import Hyper
from polyquant.architectures.record import Architecture
from polyquant.errors import InputError
from polyquant.ops.decoder import on_grid
from polyquant.runtime.tensors import Tensors
from polyquant.types import F32

__all__ = ["C8", "grid_name", "read_c8"]

_STORED = re.compile(
    r"(?P<owner>.+?)(?P<fused>\.[a-z_]*query_key_value|\.W_pack)?\.(?P<which>[kv])_proj\.(?P<part>kv_cache_(scale|offset))"
)


@dataclass(frozen=True, slots=True)
class C8:
    """The grids of the cache.

    grids: per layer with attention, float32 [G, 4, D]: step and offset of the key channels, then of the value channels.
    after_rope: measured after RoPE.
    """

    grids: tuple[F32 | None, ...]
    after_rope: bool

    def rounded(self, index: int, k: F32, v: F32) -> tuple[F32, F32]:
        """Round outputs of the linear layers [T, G, D] to the grid of layer `index`, if it was measured before RoPE."""
        grid = self.grids[index]
        if self.after_rope or grid is None:
            return k, v
        parts = [np.ascontiguousarray(grid[:, i]) for i in range(4)]
        return on_grid(k, parts[0], parts[1]), on_grid(v, parts[2], parts[3])


def grid_name(architecture: Architecture, name: str) -> str | None:
    """Return the decoder's name of a stored scale or offset of the cache, e.g. "blk.0.attn_k.kv_cache_scale", or
    None."""
    match = _STORED.fullmatch(name)
    if match is None:
        return None
    stem = match["owner"] + (match["fused"] or f".{match['which']}_proj")
    known = architecture.names.to_gguf(f"{stem}.weight")
    if known is None:
        return None
    return f"{known.removesuffix('.weight').replace('attn_qkv', 'attn_' + match['which'])}.{match['part']}"


def read_c8(tensors: Tensors, hyper: Hyper, *, after_rope: bool) -> C8 | None:
    """Read the grids of all layers with attention, None if there are none.

    Raises InputError if a layer's grid is missing or a step is not positive.
    """
    suffixes = [f"attn_{which}.kv_cache_{part}" for which in "kv" for part in ("scale", "offset")]
    needed = [[f"blk.{i}.{suffix}" for suffix in suffixes] for i in range(hyper.layers)]
    if not any(name in tensors for names in needed for name in names):
        return None
    return C8(
        tuple(_grid(tensors, hyper, names) if hyper.attends(i) else None for i, names in enumerate(needed)), after_rope
    )


def _grid(tensors: Tensors, hyper: Hyper, names: Iterable[str]) -> F32:
    width = hyper.kv_heads * hyper.head_size
    grid = np.stack([tensors.vector(name, width).reshape(hyper.kv_heads, hyper.head_size) for name in names], 1)
    if not (np.isfinite(grid).all() and (grid[:, ::2] > 0).all()):
        first = next(iter(names))
        raise InputError(
            "scales of the cache must be positive and finite", file=tensors.checkpoint.path, tensor=tensors.names[first]
        )
    return np.ascontiguousarray(grid, np.float32)
