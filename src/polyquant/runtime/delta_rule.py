"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024) as in Qwen3-Next (modeling_qwen3_next.py of transformers):

[q, k, v] = silu(conv(QKV n));  z = G n;  [b, d] = B n;  n = norm(h)
rate = sigmoid(b);  S = exp(a softplus(d + dt)) S;  S = S + k (rate (v - S^T k))^T;  y = S^T q
Out (norm(y) * silu(z))

Per head; q and k are normalized to unit length, q is divided by sqrt(size), and the norm is over a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyquant.architectures import delta_rule as record
from polyquant.architectures.delta_rule import delta_sizes
from polyquant.ops.recurrent import convolve, delta_rule, sigmoid, silu, softplus, unit
from polyquant.runtime.kv_cache import LayerCache
from polyquant.runtime.rotary import Rotation
from polyquant.runtime.site import Site
from polyquant.runtime.state import Arrays
from polyquant.types import F32

__all__ = ["DeltaRule"]


class DeltaRule:
    """The gated delta rule of one layer."""

    linears = ("first", "out")
    recordable = False
    separable = True

    def __init__(self, part: record.DeltaRule, site: Site) -> None:
        shapes = part.parameters(site.hyper, site.index)
        self.index, self.tiled = site.index, part.tiled
        self.keys, self.key, self.each, self.value = delta_sizes(site.hyper)
        self.norm, self.head_norm = site.norm(part.norm), site.norm("ssm_norm")
        self.first, self.out = site.linear(*part.inputs), site.linear("ssm_out")
        channels, span = shapes["ssm_conv1d.weight"]
        self.kernel, self.bias = (
            site.array("ssm_conv1d.weight", (channels, span)),
            site.optional_bias("ssm_conv1d", channels),
        )
        self.dt_bias, self.a = (site.array(name, shapes[name]) for name in ("ssm_dt.bias", "ssm_a"))
        self.state_spec = site.states((span - 1, channels), (self.keys * self.each, self.key, self.value))

    def __call__(self, x: F32, rotations: Sequence[Rotation], cache: LayerCache) -> F32:
        """x [T, hidden] -> [T, hidden]; the last convolution inputs and the recurrent state are stored in the cache."""
        mixed, z, *rest = self.first(self.norm(x))
        b, d = rest if self.tiled else self._split(rest[0])
        y = cache.scan(self.index, self._scanned, mixed, b, d)
        (out,) = self.out(self.head_norm(y).reshape(len(x), -1) * silu(z))
        return out

    def _scanned(self, states: Arrays, mixed: F32, b: F32, d: F32) -> tuple[F32, Arrays]:
        """q, k, v [T, channels] before the convolution, b and d [T, heads] -> y [T, heads, value]."""
        (window, state), tokens, cut = states, len(mixed), self.keys * self.key
        mixed, window = convolve(window, mixed, self.kernel, self.bias)
        q, k, v = np.split(silu(mixed), (cut, 2 * cut), axis=1)
        q, k = (self._repeat_heads(unit(y.reshape(tokens, self.keys, self.key))) for y in (q, k))
        decays = self.a * softplus(d + self.dt_bias)
        y, state = delta_rule(
            state, q * np.float32(self.key**-0.5), k, v.reshape(tokens, -1, self.value), decays, sigmoid(b)
        )
        return y, (window, state)

    def _split(self, both: F32) -> tuple[F32, F32]:
        """Split [T, 2 * heads], per key head its rates and decays, into [T, heads] each."""
        b, d = np.split(both.reshape(len(both), self.keys, 2 * self.each), 2, axis=2)
        return b.reshape(len(both), -1), d.reshape(len(both), -1)

    def _repeat_heads(self, x: F32) -> F32:
        """Repeat key heads for their value heads: [T, keys, size] -> [T, heads, size]."""
        return np.tile(x, (1, self.each, 1)) if self.tiled else x.repeat(self.each, axis=1)
