"""The mixer of Mamba-2 (Dao and Gu 2024; modeling_mamba2.py of transformers):

[z, x, B, C, dt] = In norm(h);  [x, B, C] = silu(conv([x, B, C]));  dt = softplus(dt + b)
S = exp(dt a) S + dt x B^T;  y = S C + d x, per head;  Out norm(y * silu(z)), the norm over a group of heads

dt is not limited: like llama.cpp, we ignore `time_step_min` of Nemotron-H, which transformers applies to prompts
but not to single tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyquant.architectures.mixer import Mixer
from polyquant.errors import UnsupportedError
from polyquant.ops.recurrent import convolve, silu, softplus, state_space
from polyquant.runtime.kv_cache import LayerCache
from polyquant.runtime.norm import bare_norm
from polyquant.runtime.rotary import Rotation
from polyquant.runtime.site import Site
from polyquant.runtime.state import Arrays
from polyquant.types import F32

__all__ = ["StateSpace"]


class StateSpace:
    """The mixer of one layer. Raises UnsupportedError if the time steps are limited."""

    linears = ("first", "out")
    recordable = False
    separable = True

    def __init__(self, part: Mixer, site: Site) -> None:
        hyper, shapes = site.hyper, part.parameters(site.hyper, site.index)
        _refuse_limits(site)
        self.index = site.index
        self.inner, self.heads, self.groups, self.states = (
            hyper.count(f"ssm_{name}") for name in ("inner", "heads", "groups", "state")
        )
        self.norm = site.norm(part.norm)
        self.first, self.out = site.linear("ssm_in"), site.linear("ssm_out")
        channels, span = shapes["ssm_conv1d.weight"]
        self.kernel = site.array("ssm_conv1d.weight", (channels, span))
        self.bias = site.optional_bias("ssm_conv1d", channels)
        self.dt_bias, self.a, self.d = (
            site.array(name, shapes[name]).reshape(-1) for name in ("ssm_dt.bias", "ssm_a", "ssm_d")
        )
        normed = not part.optional_norm or "ssm_norm" in site
        self.weight = site.array("ssm_norm.weight", shapes["ssm_norm.weight"]).reshape(-1) if normed else None
        self.bare = bare_norm(self.inner // self.groups, hyper.norm_eps)
        self.gate_last = bool(hyper.count("norm_before_gate"))
        self.state_spec = site.states((span - 1, channels), (self.heads, self.inner // self.heads, self.states))

    def __call__(self, x: F32, rotations: Sequence[Rotation], cache: LayerCache) -> F32:
        """x [T, hidden] -> [T, hidden]; the last convolution inputs and the recurrent state are stored in the cache."""
        inner, wide = self.inner, len(self.kernel)
        z, mixed, dt = np.split(self.first(self.norm(x))[0], (inner, inner + wide), axis=1)
        (out,) = self.out(self._gated(cache.scan(self.index, self._scanned, mixed, dt), silu(z)))
        return out

    def _scanned(self, states: Arrays, mixed: F32, dt: F32) -> tuple[F32, Arrays]:
        """[x, B, C] [T, channels] before the convolution, dt [T, heads] -> S C + d x [T, inner]."""
        (window, state), tokens, inner = states, len(mixed), self.inner
        mixed, window = convolve(window, mixed, self.kernel, self.bias)
        u, b, c = np.split(silu(mixed), (inner, inner + self.groups * self.states), axis=1)
        u = u.reshape(tokens, self.heads, -1)
        b, c = (y.reshape(tokens, self.groups, -1) for y in (b, c))
        y, state = state_space(state, u, softplus(dt + self.dt_bias), self.a, b, c)
        return (y + u * self.d[:, None]).reshape(tokens, inner), (window, state)

    def _gated(self, y: F32, gate: F32) -> F32:
        if self.weight is None:
            return y * gate
        if self.gate_last:
            return self._normed(y, self.weight) * gate
        return self._normed(y * gate, self.weight)

    def _normed(self, y: F32, weight: F32) -> F32:
        grouped = y.reshape(len(y), self.groups, -1)
        return self.bare(grouped).reshape(y.shape) * weight


def _refuse_limits(site: Site) -> None:
    """Raise UnsupportedError if config.json limits the time steps: GGUF cannot express it, and transformers applies it
    to prompts only."""
    checkpoint = site.tensors.checkpoint
    limits = checkpoint.config.get("time_step_limit") if checkpoint.naming != "gguf" else None
    if not isinstance(limits, Sequence) or isinstance(limits, str) or len(limits) != 2:
        return
    low, high = limits
    if (isinstance(low, int | float) and low > 0) or (isinstance(high, int | float) and high < 1e30):
        raise UnsupportedError(
            "limited time steps are not supported",
            file=checkpoint.path / "config.json",
            found=f"time_step_limit {list(limits)}",
        )
