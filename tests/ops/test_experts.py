"""Routing: each architecture's rule written out token by token, ties, NaN and infinity; both engines agree."""

from __future__ import annotations

import math

import numpy as np
import pytest

from polyquant.errors import InputError
from polyquant.ops import native
from polyquant.ops.activations import activate
from polyquant.ops.experts import (
    Routing,
    add_expert_bias,
    add_gated,
    clamped_swiglu,
    combine,
    route,
    weighted_inputs,
)

TOKENS = (1, 2, 7, 64)


def best(values: list[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def softmax(values: list[float]) -> list[float]:
    e = [math.exp(v - max(values)) for v in values]
    return [v / sum(e) for v in e]


def sigmoid(values: list[float]) -> list[float]:
    return [1 / (1 + math.exp(-v)) for v in values]


def mixtral(z, bias):
    p = softmax(z)
    ids = best(p, 2)
    return ids, [p[i] / sum(p[j] for j in ids) for i in ids]


def qwen2_moe(z, bias):
    p = softmax(z)
    ids = best(p, 4)
    return ids, [p[i] for i in ids]


def gpt_oss(z, bias):
    ids = best(z, 4)
    return ids, softmax([z[i] for i in ids])


def deepseek_v2(z, bias):
    p = softmax(z)
    size = len(p) // 8
    groups = best([max(p[g * size : (g + 1) * size]) for g in range(8)], 3)
    masked = [v if i // size in groups else 0.0 for i, v in enumerate(p)]
    ids = best(masked, 6)
    return ids, [16.0 * masked[i] for i in ids]


def deepseek_v3(z, bias):
    p = sigmoid(z)
    size = len(p) // 8
    choice = [v + b for v, b in zip(p, bias, strict=True)]
    groups = best([sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(8)], 4)
    ids = best([v if i // size in groups else -math.inf for i, v in enumerate(choice)], 8)
    return ids, [2.5 * p[i] / (sum(p[j] for j in ids) + 1e-20) for i in ids]


def minimax_m2(z, bias):
    p = sigmoid(z)
    ids = best([v + b for v, b in zip(p, bias, strict=True)], 8)
    return ids, [p[i] / sum(p[j] for j in ids) for i in ids]


def lfm2_moe(z, bias):
    p = sigmoid(z)
    ids = best([v + b for v, b in zip(p, bias, strict=True)], 4)
    return ids, [1.5 * p[i] / (sum(p[j] for j in ids) + 1e-6) for i in ids]


def ernie(z, bias):
    p = softmax(z)
    ids = best([v + b for v, b in zip(p, bias, strict=True)], 6)
    return ids, [p[i] / max(sum(p[j] for j in ids), 0.3) for i in ids]


def llama4(z, bias):
    ids = best(z, 1)
    return ids, sigmoid([z[ids[0]]])


E = 64
RULES = {
    "mixtral": (mixtral, Routing(E, 2, norm=True), False),
    "qwen2-moe": (qwen2_moe, Routing(E, 4), False),
    "gpt-oss": (gpt_oss, Routing(E, 4, "softmax_after_topk"), False),
    "deepseek-v2": (deepseek_v2, Routing(E, 6, scale=16.0, groups=8, groups_used=3), False),
    "deepseek-v3": (
        deepseek_v3,
        Routing(E, 8, "sigmoid", norm=True, scale=2.5, eps=1e-20, groups=8, groups_used=4, group_score="top2"),
        True,
    ),
    "minimax-m2": (minimax_m2, Routing(E, 8, "sigmoid", norm=True), True),
    "lfm2-moe": (lfm2_moe, Routing(E, 4, "sigmoid", norm=True, scale=1.5, eps=1e-6), True),
    "ernie-4.5": (ernie, Routing(E, 6, norm=True, least=0.3), True),
    "llama-4": (llama4, Routing(E, 1, "sigmoid"), False),
}


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", RULES)
def test_routing_rules_of_architectures(name, tokens, engine):
    rng = np.random.default_rng(tokens)
    rule, how, biased = RULES[name]
    logits = (2 * rng.standard_normal((tokens, E))).astype(np.float32)
    bias = (0.2 * rng.standard_normal(E)).astype(np.float32) if biased else None
    ids, weights = route(logits, how, bias)
    assert ids.dtype == np.int32 and weights.dtype == np.float32
    for t in range(tokens):
        want_ids, want = rule(logits[t].astype(float).tolist(), None if bias is None else bias.astype(float).tolist())
        assert ids[t].tolist() == want_ids
        np.testing.assert_allclose(weights[t], want, rtol=3e-7)


def test_experts_of_other_groups_are_never_selected(engine):
    """Not even where the experts of the best groups have scores below 0."""
    logits = np.zeros((1, 8), np.float32)
    bias = np.array([1, -1, 0.9, -1, 0, 0, 0, 0], np.float32)
    how = Routing(8, 3, "sigmoid", groups=4, groups_used=2)
    ids, _ = route(logits, how, bias)
    assert ids.tolist() == [[0, 2, 1]]


ODD = [
    Routing(16, 5),
    Routing(16, 5, "sigmoid", norm=True),
    Routing(16, 16, "softmax_after_topk"),
    Routing(16, 1, norm=True),
]
GROUPED = [
    Routing(16, 5, groups=4, groups_used=2),
    Routing(16, 5, "sigmoid", groups=4, groups_used=2, group_score="top2"),
]


@pytest.mark.skipif(not native.available(), reason="no native kernels here")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("how", [*ODD, *GROUPED])
def test_engines_agree_on_ties_and_nan(how, biased):
    rng = np.random.default_rng(11)
    if biased and how.gating == "softmax_after_topk":
        return
    logits = rng.integers(-1, 2, (400, 16)).astype(np.float32)
    for value, share in ((np.nan, 0.05), (np.inf, 0.05), (-np.inf, 0.2), (88.0, 0.02), (-104.0, 0.02)):
        logits[200:][rng.random((200, 16)) < share] = value
    logits[-1], logits[-2], logits[-3] = np.nan, -np.inf, np.inf
    bias = rng.integers(-1, 2, 16).astype(np.float32) if biased else None
    found = []
    for which in ("native", "numpy"):
        with native.engine(which):
            found.append(route(logits, how, bias))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=2e-7)
    ids = found[0][0]
    assert ((ids >= 0) & (ids < 16)).all() and all(len(set(row)) == how.used for row in ids.tolist())


def test_of_equal_experts_the_first_is_selected(engine):
    ids, weights = route(np.zeros((2, 8), np.float32), Routing(8, 3, norm=True))
    assert ids.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)
    ids, _ = route(np.array([[0, 5, 5, 0, 5, 0, 0, 0]], np.float32), Routing(8, 5, groups=4, groups_used=3))
    assert ids.tolist() == [[1, 2, 4, 0, 3]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"used": 0}, {"used": 9}, {"gating": "tanh"}, {"groups": 3}, {"groups": 0}, {"groups": 4, "groups_used": 0},
        {"groups": 4, "groups_used": 5},
        {"used": 3, "groups": 4, "groups_used": 1}, {"group_score": "mean"},
        {"groups": 8, "groups_used": 8, "group_score": "top2"},
        {"scale": math.nan}, {"eps": math.inf},
    ],
)  # fmt: skip
def test_invalid_router_parameters(wrong):
    with pytest.raises(InputError):
        Routing(**{"experts": 8, "used": 2, **wrong})


def test_mismatched_shapes(engine):
    logits, bias = np.zeros((2, 8), np.float32), np.zeros(8, np.float32)
    for a, b in ((logits[:, :7], None), (logits[0], None), (logits, bias[:7])):
        with pytest.raises(InputError):
            route(a, Routing(8, 2), b)
    with pytest.raises(InputError):
        route(logits, Routing(8, 2, "softmax_after_topk"), bias)


@pytest.mark.parametrize("tokens", TOKENS)
def test_outputs_of_experts(tokens, engine):
    rng = np.random.default_rng(tokens)
    used, n = 3, 37
    y = rng.standard_normal((tokens * used, n)).astype(np.float32)
    weights = rng.random((tokens, used)).astype(np.float32)
    wide = y.reshape(tokens, used, n).astype(float)
    np.testing.assert_allclose(combine(y, used, weights), (wide * weights[:, :, None]).sum(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(combine(y, used), wide.sum(1), rtol=1e-5, atol=1e-6)
    x = rng.standard_normal((tokens, n)).astype(np.float32)
    np.testing.assert_array_equal(
        weighted_inputs(x, weights).reshape(tokens, used, n), x[:, None] * weights[:, :, None]
    )
    gate = (30 * rng.standard_normal((tokens, 1))).astype(np.float32)
    want = x + 1 / (1 + np.exp(-gate.astype(float))) * y[:tokens]
    np.testing.assert_allclose(add_gated(x, y[:tokens], gate), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(activate("relu2", y), np.maximum(y, 0) ** 2)


@pytest.mark.parametrize("tokens", TOKENS)
def test_bias_of_the_expert_of_each_row(tokens, engine):
    rng = np.random.default_rng(tokens)
    both, bias = rng.standard_normal((tokens, 20)).astype(np.float32), rng.standard_normal((5, 7)).astype(np.float32)
    ids = rng.integers(0, 5, tokens).astype(np.int32)
    want = both.copy()
    want[:, 4:11] += bias[ids]
    add_expert_bias(both[:, 4:11], bias, ids)
    np.testing.assert_array_equal(both, want)


@pytest.mark.parametrize("n", [1, 3, 64, 91])
def test_clamped_gates(n, engine):
    """The formula of GPT-OSS in float64, on halves and on pairs."""
    rng = np.random.default_rng(n)
    both = (6 * rng.standard_normal((5, 2 * n))).astype(np.float32)

    def formula(gate, up):
        gate, up = np.minimum(gate.astype(float), 7), np.clip(up.astype(float), -7, 7)
        return (up + 1) * gate / (1 + np.exp(-1.702 * gate))

    np.testing.assert_allclose(
        clamped_swiglu(both[:, :n], both[:, n:]), formula(both[:, :n], both[:, n:]), rtol=2e-6, atol=1e-6
    )
    np.testing.assert_allclose(
        clamped_swiglu(both[:, ::2], both[:, 1::2]), formula(both[:, ::2], both[:, 1::2]), rtol=2e-6, atol=1e-6
    )
