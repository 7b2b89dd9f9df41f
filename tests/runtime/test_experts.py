"""Routed products against single matrices; expert feed-forward in both engines and in a recorded step."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import polyquant as pq
from polyquant.errors import InputError
from polyquant.ops import native
from polyquant.ops.activations import activate
from polyquant.ops.decoder import swiglu
from polyquant.ops.experts import Ids, Routing, clamped_swiglu
from polyquant.ops.matmul import round_activations
from polyquant.rows import HeldArray, in_memory
from polyquant.runtime.expert_linear import ExpertLinear
from polyquant.runtime.experts import Experts, SharedExpert
from polyquant.runtime.linear import Linear
from polyquant.types import F32, Floats, Ternary, Weight

CODECS = ("q4_k", "q8_0", "mxfp4", "f32", "bf16", "iq4_xs", "q6_k", "tq2_0")
APART = ("f8_e4m3", "f64", "w8a16", "w8a8.dynamic")
TOKENS = (1, 2, 7, 64)
E, N, K = 12, 40, 512
ROUTING = Routing(E, 4, norm=True)


def weight(codec: str, *shape: int, seed: int = 0) -> Weight:
    """Random numbers in that codec: of a ternary one without a quantizer for them, -0.03, 0 and 0.03."""
    kind, rng = pq.codec(codec), np.random.default_rng(seed)
    rows, k = int(np.prod(shape[:-1])), shape[-1]
    if kind.form is Ternary and codec != "tq2_0":
        w = np.float32(0.03) * rng.integers(-1, 2, (rows, k)).astype(np.float32)
    else:
        w = (rng.standard_normal((rows, k)) / k**0.5).astype(np.float32)
    parts = kind.pack(kind.quantize(w))
    return Weight(f"{codec}{shape}", shape, kind, in_memory(parts))


def floats(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def choices(kind: str, tokens: int, used: int, seed: int = 0) -> Ids:
    """ids [T, used]: of all experts; of the first half; one expert for everything; experts 0 and 11 only, unevenly."""
    rng = np.random.default_rng(seed)
    if kind == "one":
        return np.full((tokens, used), 5, np.int32)
    if kind == "two":
        return np.where(rng.random((tokens, used)) < 0.2, 11, 0).astype(np.int32)
    many = E if kind == "any" else E // 2
    return np.array([rng.permutation(many)[:used] for _ in range(tokens)], np.int32)


def one_by_one(stack: Weight, x: F32, ids: Ids, rounding: str) -> tuple[F32, F32]:
    """The products in float64, and the sums of their terms' magnitudes."""
    w = stack.codec.dequantize(stack.parts, stack.shape).reshape(stack.shape).astype(np.float64)
    seen = x if stack.codec.form is Floats else round_activations(x, rounding)
    rows, chosen = np.repeat(seen, ids.size // len(x), 0).astype(np.float64), ids.reshape(-1)
    want, bound = np.empty((2, len(rows), w.shape[1]))
    for e in np.unique(chosen):
        mine = chosen == e
        want[mine], bound[mine] = rows[mine] @ w[e].T, np.abs(rows[mine]) @ np.abs(w[e]).T
    return want, bound


@pytest.mark.parametrize("rounding", ["block", "none"])
@pytest.mark.parametrize("codec", CODECS)
def test_rows_are_multiplied_by_their_expert(codec, rounding, kernels):
    stacks = [weight(codec, E, N, K, seed=1), weight(codec, E, N // 2, K, seed=2)]
    linear = ExpertLinear(stacks, [None, None], rounding)
    assert linear.kernel == "packed"
    for tokens in TOKENS:
        for kind in ("any", "half", "one", "two"):
            ids = choices(kind, tokens, 4, seed=tokens)
            for rows in {tokens, 4 * tokens}:
                x = floats(rows, K, seed=rows)
                for y, stack in zip(linear(x, ids), stacks, strict=True):
                    want, bound = one_by_one(stack, x, ids, linear.rounding)
                    assert y.shape == want.shape
                    assert (np.abs(y - want) <= 3e-6 * bound).all(), (tokens, kind, rows)


@pytest.mark.parametrize("codec", ["q8_0", "f32", APART[0]])
def test_rows_use_the_matrices_in_turn(codec, engine):
    """Without ids row i takes matrix i % E: heads of tokens."""
    linear = ExpertLinear([weight(codec, E, N, K)], [floats(E, N)], "block")
    for rows in (1, E, 3 * E + 2):
        x = floats(rows, K, seed=rows)
        ids = (np.arange(rows) % E).astype(np.int32)[:, None]
        np.testing.assert_array_equal(linear(x, None)[0], linear(x, ids)[0])


@pytest.mark.parametrize("codec", [*CODECS, *APART])
def test_engines_agree(codec):
    stacks, bias = [weight(codec, E, N, K)], [floats(E, N)]
    linear = ExpertLinear(stacks, bias, "block")
    for tokens in TOKENS:
        x, ids = floats(tokens, K), choices("any", tokens, 3)
        found = []
        for which in ("native", "numpy"):
            with native.engine(which):
                found.append(linear(x, ids)[0])
        np.testing.assert_allclose(found[0], found[1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("codec", CODECS)
def test_separate_matrices_form_a_stack(codec, engine):
    whole = weight(codec, E, N, K)
    one = ExpertLinear([whole], [None], "block")
    parts = {
        key: array.view().reshape(E, N, -1) if array.view().ndim else array.view()
        for key, array in whole.arrays.items()
    }
    apart = [
        Weight(
            f"{codec}.{e}",
            (N, K),
            whole.codec,
            {key: HeldArray(np.ascontiguousarray(p[e])) for key, p in parts.items()},
        )
        for e in range(E)
    ]
    each = ExpertLinear([apart], [None], "block")
    x, ids = floats(7, K), choices("any", 7, 3)
    np.testing.assert_array_equal(one(x, ids)[0], each(x, ids)[0])


@pytest.mark.parametrize("codec", ["i2_s.x86", "i2_s.arm", "i2_s.x4", "hf_bitnet.bitlinear"])
def test_ternary_experts_have_separate_handles(codec, engine):
    """Kernels that take several rows at once, next to each other or a quarter of the matrix apart."""
    apart = [weight(codec, 128, 256, seed=e) for e in range(4)]
    linear = ExpertLinear([apart], [None], "block")
    x, ids = floats(5, 256), np.array([[0, 3], [3, 0], [0, 1], [1, 3], [3, 1]], np.int32)
    (y,) = linear(x, ids)
    for a, e in enumerate(ids.reshape(-1)):
        (want,) = Linear([apart[e]], [None], "block")(x[a // 2 : a // 2 + 1])
        np.testing.assert_allclose(y[a], want[0], rtol=1e-5, atol=1e-5)


def test_unselected_experts_are_not_read(engine):
    """Their values are arbitrary."""
    kind = pq.codec("f32")
    w = np.full((E, N, K), np.nan, np.float32)
    w[[2, 7]] = floats(2, N, K)
    stack = Weight("w", (E, N, K), kind, in_memory(kind.pack(kind.quantize(w.reshape(-1, K)))))
    (y,) = ExpertLinear([stack], [None], "block")(floats(3, K), np.array([[2, 7], [7, 2], [2, 2]], np.int32))
    assert np.isfinite(y).all()


def test_mismatched_stacks():
    with pytest.raises(InputError, match="stacks"):
        ExpertLinear([weight("q8_0", 4, 8, 64), weight("q8_0", 5, 8, 64)], [None, None], "block")
    with pytest.raises(InputError, match="stacks"):
        ExpertLinear([weight("q8_0", 4, 8, 64), weight("q8_0", 4, 8, 32)], [None, None], "block")
    with pytest.raises(InputError, match="bias"):
        ExpertLinear([weight("q8_0", 4, 8, 64)], [floats(4, 9)], "block")


def test_experts_of_a_stack_with_one_scale():
    stack, x, ids = weight("i2_s.x86", 4, 64, 256), floats(3, 256), np.array([[2], [0], [2]], np.int32)
    (y,) = ExpertLinear([stack], [None], "none")(x, ids)
    exact = stack.dequantize().reshape(4, 64, 256)
    np.testing.assert_allclose(y, [exact[e] @ row for e, row in zip(ids[:, 0], x, strict=True)], rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- the whole part


HIDDEN, WIDE = 256, 512


def pairs(both: F32) -> F32:
    """Gates in the even columns and ups in the odd ones, as GPT-OSS stores them."""
    return clamped_swiglu(both[:, ::2], both[:, 1::2])


def part(which: str, codec: str = "q8_0") -> Experts:
    """A feed-forward part as some family has it."""
    router = Linear([weight("f32", E, HIDDEN, seed=1)], [None], "block")
    gate, up = (weight(codec, E, WIDE, HIDDEN, seed=s) for s in (2, 3))
    both, down = (
        weight(codec, E, 2 * WIDE, HIDDEN, seed=4),
        ExpertLinear([weight(codec, E, HIDDEN, WIDE, seed=5)], [None], "block"),
    )
    two, one = ExpertLinear([gate, up], [None, None], "block"), ExpertLinear([both], [None], "block")
    if which == "qwen3":
        return Experts(router, ROUTING, two, down)
    if which == "qwen2":
        own = [
            Linear([weight(codec, WIDE, HIDDEN, seed=s) for s in (6, 7)], [None, None], "block"),
            Linear([weight(codec, HIDDEN, WIDE, seed=8)], [None], "block"),
        ]
        shared = SharedExpert(*own, gate=Linear([weight("f32", 1, HIDDEN, seed=9)], [None], "block"))
        return Experts(router, Routing(E, 4), one, down, halves=True, shared=shared)
    if which == "deepseek":
        own = [
            Linear([weight(codec, WIDE, HIDDEN, seed=s) for s in (6, 7)], [None, None], "block"),
            Linear([weight(codec, HIDDEN, WIDE, seed=8)], [None], "block"),
        ]
        how = Routing(E, 3, "sigmoid", norm=True, scale=2.5, eps=1e-20, groups=4, groups_used=2, group_score="top2")
        return Experts(router, how, two, down, bias=floats(E), shared=SharedExpert(*own))
    if which == "gpt-oss":
        biased = ExpertLinear([both], [floats(E, 2 * WIDE)], "block")
        down = ExpertLinear([weight(codec, E, HIDDEN, WIDE, seed=5)], [floats(E, HIDDEN, seed=3)], "block")
        router = Linear([weight("f32", E, HIDDEN, seed=1)], [floats(E)], "block")
        return Experts(router, Routing(E, 4, "softmax_after_topk"), biased, down, activation=pairs)
    if which == "llama4":
        return Experts(router, Routing(E, 1, "sigmoid"), two, down, weighted="inputs")
    assert which == "nemotron"
    return Experts(router, ROUTING, ExpertLinear([up], [None], "block"), down, activation=partial(activate, "relu2"))


PARTS = ("qwen3", "qwen2", "deepseek", "gpt-oss", "llama4", "nemotron")


@pytest.mark.parametrize("which", PARTS)
def test_a_part_in_both_engines(which):
    made = part(which)
    for tokens in TOKENS:
        x = floats(tokens, HIDDEN, seed=tokens)
        found = []
        for name in ("native", "numpy"):
            with native.engine(name):
                found.append(made(x))
        # int8 codes of the second input may differ by one where the first product is rounded the other way
        np.testing.assert_allclose(found[0], found[1], rtol=1e-2, atol=2e-2 * np.abs(found[1]).max())
        assert np.median(np.abs(found[0] - found[1])) <= 1e-5 * np.abs(found[1]).max()


@pytest.mark.parametrize("which", PARTS)
def test_a_part_token_by_token(which, engine):
    """A token's result does not depend on the other tokens."""
    made = part(which, "f32")
    x = floats(7, HIDDEN)
    np.testing.assert_allclose(made(x), np.concatenate([made(x[t : t + 1]) for t in range(7)]), rtol=1e-4, atol=1e-5)


def test_a_part_equals_its_formula(engine):
    """Mixtral's sum written out in float64."""
    made, x = part("qwen3", "f32"), floats(5, HIDDEN)
    router, gate, up, down = (
        w.dequantize().reshape(w.shape).astype(float)
        for w in (weight("f32", E, HIDDEN, seed=1), weight("f32", E, WIDE, HIDDEN, seed=2),
            weight("f32", E, WIDE, HIDDEN, seed=3), weight("f32", E, HIDDEN, WIDE, seed=5))
    )  # fmt: skip
    want = np.zeros_like(x, float)
    for t, row in enumerate(x.astype(float)):
        z = router @ row
        p = np.exp(z) / np.exp(z).sum()
        ids = np.argsort(-p)[:4]
        for e in ids:
            g = gate[e] @ row
            want[t] += p[e] / p[ids].sum() * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ row)))
    np.testing.assert_allclose(made(x), want, rtol=1e-4, atol=1e-5)


def test_a_router_with_the_wrong_number_of_experts():
    down = ExpertLinear([weight("q8_0", 4, 64, 64)], [None], "block")
    up = ExpertLinear([weight("q8_0", 4, 64, 64), weight("q8_0", 4, 64, 64)], [None, None], "block")
    with pytest.raises(InputError, match="router"):
        Experts(Linear([weight("f32", 5, 64)], [None], "block"), Routing(5, 2), up, down)


@pytest.mark.skipif(native.lib() is None, reason="recording needs the native kernels")
@pytest.mark.parametrize("which", PARTS)
def test_one_token_on_a_tape(which):
    """A recorded token is routed again when it runs with a different input."""
    made, lib = part(which), native.module()
    tape = lib.Tape()
    inputs = [floats(1, HIDDEN, seed=s) for s in range(6)]
    with tape:
        x = native.empty(1, HIDDEN)
        x[:] = inputs[0]
        out = made(x)
    assert tape.complete
    np.testing.assert_array_equal(out, made(inputs[0]))
    for again in inputs[1:]:
        x[:] = again
        tape.run(0)
        np.testing.assert_array_equal(out, made(again))


@pytest.mark.skipif(native.lib() is None, reason="recording needs the native kernels")
def test_experts_without_a_kernel_are_not_recorded():
    linear = ExpertLinear([weight("f8_e4m3", E, N, K)], [None], "block")
    assert linear.kernel == "apart"
    tape = native.module().Tape()
    with tape:
        x = native.empty(1, K)
        x[:] = 1
        (y,) = linear(x, np.array([[1, 2]], np.int32))
        swiglu(y, y)
    assert not tape.complete


@pytest.mark.skipif(native.lib() is None, reason="recording needs the native kernels")
def test_invalid_expert_ids():
    """Python rejects such ids; in a recorded step these rows become NaN and no other row is written."""
    stacks = native.module().PackedExperts([pq.codec("q8_0").packed(weight("q8_0", 4, 8, 64).parts, (32, 64))], 4)
    x = floats(2, 64)
    for bad in (-1, 4, 1 << 30):
        with pytest.raises(ValueError, match="expert"):
            stacks.multiply(x, np.array([0, bad], np.int32), 1, np.empty((2, 8), np.float32))
    tape = native.module().Tape()
    with tape:
        ids, x, y, bias = native.empty(3).view(np.int32), native.empty(1, 64), native.empty(3, 8), floats(4, 8)
        ids[:], x[:] = [0, 1, 3], 1
        stacks.multiply(x, ids, 1, y)
        native.module().add_expert_bias(y, bias, ids)
    assert tape.complete
    sound = y.copy()
    ids[:] = [0, 1 << 30, -1]
    tape.run(0)
    np.testing.assert_array_equal(y[0], sound[0])
    assert np.isnan(y[1:]).all()
