"""Mixture of experts: routing, and combination of the experts' outputs. numpy references and their native counterparts.

T tokens, E experts, `used` per token, A = T * used assignments: assignment t * used + j is the j-th expert of token t.

Shazeer et al. 2017 (mixtures), Fedus et al. 2021 (Switch), DeepSeek-AI 2024 (V2: groups of experts; V3: sigmoid scores
and a selection bias). Softmax and sigmoid are computed in float64 and rounded to float32, so that both engines select
the same experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError
from polyquant.ops import native
from polyquant.ops.activations import gated
from polyquant.ops.arithmetic import exp, fast_kernels
from polyquant.ops.decoder import add
from polyquant.ops.matmul import ROUNDING_CODES
from polyquant.types import F32, Rounding

__all__ = [
    "ExpertGroup",
    "Gating",
    "Ids",
    "Routing",
    "add_expert_bias",
    "add_gated",
    "clamped_swiglu",
    "combine",
    "route",
    "scaled_weights",
    "weighted_inputs",
]

Ids: TypeAlias = NDArray[np.int32]
Gating: TypeAlias = Literal["softmax", "sigmoid", "softmax_after_topk"]
"""The function from logits to scores: softmax over all experts, sigmoid, or softmax over the experts selected by
logits."""
_SCORES: dict[Gating, int] = {"softmax": 0, "sigmoid": 1, "softmax_after_topk": 2}


@dataclass(frozen=True, slots=True)
class Routing:
    """Selection and weighting of experts. Raises InputError for invalid parameters.

    experts, used: number of experts, and how many are selected per token. norm: weights are divided by max(their sum,
    least) + eps. scale: final factor of all weights. groups: of adjacent experts, of which only the best groups_used
    take part; the score of a group is the largest of its experts ("max", DeepSeek V2) or the sum of its two largest
    ("top2", V3).

        Mixtral, Qwen3-MoE        Routing(E, used, norm=True)
        OLMoE, Qwen2-MoE          Routing(E, used, norm=norm_topk_prob)
        GPT-OSS, Granite-MoE      Routing(E, used, "softmax_after_topk")
        Llama 4                   Routing(E, 1, "sigmoid")
        DeepSeek V2               Routing(E, used, groups=, groups_used=, scale=)
        DeepSeek V3, GLM-4-MoE    Routing(E, used, "sigmoid", norm=True, eps=1e-20, scale=, groups=, groups_used=,
                                          group_score="top2") and a bias
        MiniMax-M2                Routing(E, used, "sigmoid", norm=True) and a bias
        LFM2-MoE                  Routing(E, used, "sigmoid", norm=True, eps=1e-6, scale=) and a bias
        ERNIE-4.5-MoE             Routing(E, used, norm=True, least=1e-12) and a bias
    """

    experts: int
    used: int
    gating: Gating = "softmax"
    norm: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1
    group_score: Literal["max", "top2"] = "max"
    eps: float = 0.0
    least: float = 0.0

    def __post_init__(self) -> None:
        if self.gating not in _SCORES:
            raise InputError("unknown gating of experts", expected=" or ".join(_SCORES), found=self.gating)
        if self.group_score not in ("max", "top2"):
            raise InputError("unknown score of a group of experts", expected="max or top2", found=self.group_score)
        if not 1 <= self.used <= self.experts:
            raise InputError("experts per token out of range", expected=f"1 to {self.experts}", found=self.used)
        if self.groups < 1 or self.experts % self.groups:
            raise InputError(
                "groups must divide the experts", expected=f"a divisor of {self.experts}", found=self.groups
            )
        size = self.experts // self.groups
        fewest = -(-self.used // size)
        if not fewest <= self.groups_used <= self.groups:
            raise InputError(
                "groups per token out of range", expected=f"{fewest} to {self.groups}", found=self.groups_used
            )
        if self.group_score == "top2" and size < 2:
            raise InputError("top2 needs groups of at least two experts", expected="at least 2 experts", found=size)
        if not all(math.isfinite(x) for x in (self.scale, self.eps, self.least)):
            raise InputError("scale, eps and least of a router must be finite")


def route(logits: F32, how: Routing, bias: F32 | None = None) -> tuple[Ids, F32]:
    """Select experts by logits [T, E]; return ids int32 [T, used], best first, lower index first, and weights float32
    [T, used].

    bias: float32 [E], added to the scores for the selection only; weights are the scores without it. A NaN logit counts
    as -inf. Raises InputError for shapes that do not fit, and for a bias with "softmax_after_topk", which has no scores
    of all experts.
    """
    if logits.ndim != 2 or logits.shape[1] != how.experts or (bias is not None and bias.shape != (how.experts,)):
        raise InputError("one logit and one bias per expert required", expected=how.experts, found=list(logits.shape))
    if bias is not None and how.gating == "softmax_after_topk":
        raise InputError("a selection bias requires scores of all experts", expected="softmax or sigmoid")
    if (lib := fast_kernels()) is not None:
        ids = native.empty(len(logits), how.used).view(np.int32)
        weights = native.empty(len(logits), how.used)
        lib.route(
            logits, bias, ids, weights, _SCORES[how.gating], how.norm, how.eps, how.least, how.scale,
            how.groups, how.groups_used, how.group_score == "top2",
        )  # fmt: skip
        return ids, weights
    with np.errstate(all="ignore"):
        scores = _scores(logits, how)
        plain = bias is None and how.group_score == "max"
        choice = _ordered(logits if plain else scores if bias is None else scores + bias)
        if how.groups > 1:
            choice = _in_groups(choice, how)
        ids = _best(choice, how.used)
        picked = np.take_along_axis(scores, ids, 1)
        wide = (_softmax(picked) if how.gating == "softmax_after_topk" else picked).astype(np.float64)
        if how.norm:
            wide /= np.maximum(wide.sum(1, keepdims=True), how.least) + how.eps
        return ids, np.asarray(wide * how.scale, np.float32)


def _scores(logits: F32, how: Routing) -> F32:
    if how.gating == "softmax":
        return _softmax(logits)
    if how.gating == "sigmoid":
        return np.asarray(1 / (1 + exp(-logits.astype(np.float64))), np.float32)
    return logits


def _softmax(x: F32) -> F32:
    wide = x.astype(np.float64)
    e = exp(wide - _ordered(x).max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True), np.float32)


def _ordered(x: F32) -> F32:
    return np.where(np.isnan(x), np.float32(-np.inf), x)


def _best(values: F32, count: int) -> Ids:
    return np.argsort(-values, axis=1, kind="stable")[:, :count].astype(np.int32)


def _in_groups(choice: F32, how: Routing) -> F32:
    tokens = len(choice)
    grouped = choice.reshape(tokens, how.groups, -1)
    top = -np.sort(-grouped, axis=2)
    score = top[:, :, 0] + top[:, :, 1] if how.group_score == "top2" else top[:, :, 0]
    selected = np.zeros((tokens, how.groups, 1), bool)
    np.put_along_axis(selected[:, :, 0], _best(_ordered(score), how.groups_used), True, 1)
    return np.where(selected, grouped, np.float32(-np.inf)).reshape(choice.shape)


class ExpertGroup:
    """Native stacks of matrices with a common input. stacks: each one handle on E * N rows, or E handles on N rows
    (ops.matmul.packed).

    Raises ValueError if a handle cannot be split into experts, or shapes differ.
    """

    def __init__(self, stacks: Sequence[Any], experts: int, sizes: Sequence[int]) -> None:
        self._multiply = native.module().PackedExperts(list(stacks), experts).multiply
        ends = np.cumsum(sizes).tolist()
        self._rows = ends[-1]
        self._slices = [slice(end - n, end) for n, end in zip(sizes, ends, strict=True)]

    def __call__(self, x: F32, ids: Ids | None, rounding: Rounding) -> list[F32]:
        """Multiply x [T, K] or [A, K] by the experts ids [T, used] -> one [A, N_i] per stack, as columns of one array.

        ids: None if row i uses matrix i % E.
        """
        y = native.empty(len(x) if ids is None else ids.size, self._rows)
        self._multiply(x, None if ids is None else ids.reshape(-1), ROUNDING_CODES[rounding], y)
        return [y[:, part] for part in self._slices] if len(self._slices) > 1 else [y]


def scaled_weights(weights: F32, factors: F32, ids: Ids) -> F32:
    """Multiply non-negative weights [T, used] by factors [E] of the experts ids [T, used]."""
    if native.lib() is None:
        return np.asarray(weights * factors[ids], np.float32)
    gathered = add(weights, weights, -1.0)  # zeros, recomputed when a tape is replayed
    add_expert_bias(gathered.reshape(-1, 1), np.ascontiguousarray(factors[:, None]), ids)
    return gated("relu", weights, gathered)


def add_expert_bias(y: F32, bias: F32, ids: Ids) -> None:
    """Add bias[ids] to y [A, n] in place; bias [E, n]."""
    if (lib := native.lib()) is not None:
        lib.add_expert_bias(y, bias, ids.reshape(-1))
    else:
        np.add(y, bias[ids.reshape(-1)], out=y)


def combine(y: F32, used: int, weights: F32 | None = None) -> F32:
    """Sum the expert outputs of each token: y [A, n], weights [T, used] or None for ones -> [T, n]."""
    tokens = len(y) // used
    if (lib := native.lib()) is not None:
        out = native.empty(tokens, y.shape[1])
        lib.combine(y, weights, out)
        return out
    outputs = y.reshape(tokens, used, -1)
    out = np.zeros((tokens, y.shape[1]), np.float32)
    for j in range(used):
        out += outputs[:, j] if weights is None else outputs[:, j] * weights[:, j : j + 1]
    return out


def weighted_inputs(x: F32, weights: F32) -> F32:
    """Return the weighted input of each assignment: x [T, n], weights [T, used] -> [A, n]."""
    tokens, used = weights.shape
    if (lib := native.lib()) is not None:
        out = native.empty(tokens * used, x.shape[1])
        lib.spread(x, weights, out)
        return out
    return np.asarray((x[:, None] * weights[:, :, None]).reshape(tokens * used, -1), np.float32)


def add_gated(y: F32, x: F32, gate: F32) -> F32:
    """Return y + sigmoid(gate) * x; y, x [T, n], gate [T, 1]."""
    if (lib := fast_kernels()) is not None:
        out = native.empty(*y.shape)
        lib.add_gated(y, x, gate, out)
        return out
    with np.errstate(over="ignore"):
        return y + (1 / (1 + exp(-gate.astype(np.float64)))).astype(np.float32) * x


def clamped_swiglu(gate: F32, up: F32, alpha: float = 1.702, limit: float = 7.0) -> F32:
    """Return (clamp(up, -limit, limit) + 1) * g / (1 + exp(-alpha g)), g = min(gate, limit), as in GPT-OSS.

    gate, up [A, n], with any strides.
    """
    if (lib := fast_kernels()) is not None:
        out = native.empty(*gate.shape)
        lib.clamped_swiglu(gate, up, out, alpha, limit)
        return out
    g, u = np.minimum(gate, np.float32(limit)), np.clip(up, np.float32(-limit), np.float32(limit))
    with np.errstate(over="ignore"):
        return np.asarray(g / (1 + exp(g * np.float32(-alpha))) * (u + 1), np.float32)
