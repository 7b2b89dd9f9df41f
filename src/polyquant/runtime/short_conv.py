"""The gated short convolution of LFM2 (Liquid AI 2025; modeling_lfm2.py of transformers):

y = Out (c * conv(b * x)),  [b, c, x] = In norm(h),  conv per channel over its own and the k - 1 preceding positions
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyquant.architectures import short_conv
from polyquant.ops.recurrent import convolve
from polyquant.runtime.kv_cache import LayerCache
from polyquant.runtime.rotary import Rotation
from polyquant.runtime.site import Site
from polyquant.runtime.state import Arrays
from polyquant.types import F32

__all__ = ["ShortConv"]


class ShortConv:
    """The convolution of one layer."""

    linears = ("first", "out")
    recordable = False
    separable = True

    def __init__(self, part: short_conv.ShortConv, site: Site) -> None:
        ((name, shape),) = part.parameters(site.hyper, site.index).items()
        self.index = site.index
        self.norm = site.norm(part.norm)
        self.first, self.out = site.linear("shortconv.in_proj"), site.linear("shortconv.out_proj")
        self.kernel, self.bias = site.array(name, shape), site.optional_bias("shortconv.conv", shape[0])
        self.state_spec = site.states((shape[1] - 1, shape[0]))

    def __call__(self, x: F32, rotations: Sequence[Rotation], cache: LayerCache) -> F32:
        """x [T, hidden] -> [T, hidden]; the last convolution inputs are stored in the cache."""
        b, c, inner = np.split(self.first(self.norm(x))[0], 3, axis=1)
        (out,) = self.out(c * cache.scan(self.index, self._convolved, b * inner))
        return out

    def _convolved(self, states: Arrays, x: F32) -> tuple[F32, Arrays]:
        y, window = convolve(states[0], x, self.kernel, self.bias)
        return y, (window,)
