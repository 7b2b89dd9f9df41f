"""Every cell of the table of packings is what conversions do with all codes and with scales of every magnitude."""

import numpy as np
import pytest

import polyquant
from polyquant.analysis.matrix import FLOAT_PACKINGS, PACKINGS, between, matrix
from polyquant.codecs.affine_forms import affine_of, recoded
from polyquant.codecs.float_forms import refloated, unfloated
from polyquant.codecs.float_forms import verdict as float_verdict
from polyquant.codecs.keeping import Condition, Fate, Integers, keeps, resolved
from polyquant.codecs.pairs import traits_of
from polyquant.errors import CodecError
from polyquant.rows import in_memory
from polyquant.types import Affine, Ternary, Weight

N, K = 64, 64
INTEGERS = [n for n in PACKINGS if isinstance(traits_of(polyquant.codec(n)), Integers) and n not in ("w8a8", "tq2_0")]
SHAPE = (256, 256)
SCALES = np.concatenate([np.float16(2.0) ** np.arange(-24, 16), [65504, 1 / 3, 0.1, -0.7, -(2.0**-20), 1.0009765625]])


def weight(traits, kind, rng):
    """All codes of a codec's width, with scales and zero points that its traits allow; `kind` chooses the extremes."""
    half = 2 ** (traits.bits - 1)
    codes = (np.arange(N * K) % (2 * half) - half).reshape(N, K).astype(np.int8)
    codes = rng.permuted(codes, axis=1)
    groups = 1 if traits.tensor or not traits.group else K // traits.group
    one = (N, groups)
    scale = rng.choice(SCALES, one).astype(np.float32)
    if traits.scale == "bf16" or kind == "plain":
        scale = 2.0 ** rng.integers(-8, 4, one) * rng.choice([1, 1.5, -1.25], one)
    if traits.tensor:
        scale[:] = scale[0, 0]
    scale = scale.astype(np.float32)
    if traits.scale == "f32" and kind != "plain":
        scale *= np.float32(1.0000001)
    offset = np.zeros(one, np.float32)
    if traits.zero == "integer" and kind != "plain":
        offset = rng.integers(-half, half, one).astype(np.float32)
    if traits.zero != "bias":
        return Affine(traits.bits, codes, scale, offset)
    zeros = np.full(one, half) if kind == "plain" else rng.integers(0, 2 * half, one)
    with np.errstate(over="ignore"):
        bias = (-zeros * scale).astype(np.float16).astype(np.float32)
    if kind == "wild":
        bias = np.float16(rng.normal(size=one)).astype(np.float32)
    keep = np.isfinite(bias)
    return Affine(
        traits.bits, codes, np.where(keep, scale, 1), np.full_like(scale, -half), bias=np.where(keep, bias, 0)
    )


def values(codes):
    """The exact weights: all products have at most 32 bits."""
    groups = codes.scale.shape[1]
    cells = codes.codes.reshape(N, groups, -1).astype(np.float64)
    out = (cells - codes.offset[:, :, None]) * codes.scale[:, :, None].astype(np.float64)
    return (out if codes.bias is None else out + codes.bias[:, :, None]).reshape(N, K)


@pytest.mark.parametrize("have", INTEGERS)
@pytest.mark.parametrize("kind", ["plain", "zeros", "wild"])
def test_cells_of_integers(have, kind):
    rng = np.random.default_rng([len(have), len(kind)])
    source = polyquant.codec(have)
    mine = traits_of(source)
    if not getattr(source, "writable", True):
        return
    codes = affine_of(source, recoded(weight(mine, kind, rng), source), (N, K))
    for target in INTEGERS:
        for name in (target, f"{target}.f32"):
            try:
                codec = polyquant.codec(name)
            except LookupError:
                continue
            general = keeps(mine, traits_of(codec), K)
            if not getattr(codec, "writable", True):
                continue
            if general.fate is Fate.IMPOSSIBLE:
                check_impossible(codes, codec, mine)
                continue
            found = resolved(general, mine, traits_of(codec), [(codes.scale, codes.offset, codes.bias)])
            if found.fate is Fate.IMPOSSIBLE:
                with pytest.raises(CodecError):
                    recoded(codes, codec)
                continue
            try:
                back = affine_of(codec, recoded(codes, codec), (N, K))
            except CodecError:  # a scale beyond the range of half precision
                assert found.fate is Fate.ROUNDED, (have, name, kind)
                continue
            if found.fate is Fate.EXACT:
                np.testing.assert_array_equal(values(back), values(codes), err_msg=f"{have} to {name}, {kind}")
            else:
                assert not np.array_equal(values(back), values(codes)), f"{have} to {name}, {kind}: nothing is rounded"


def check_impossible(codes, codec, mine):
    """The pack refuses, or some weights of all that the source can hold come out different."""
    try:
        parts = recoded(codes, codec)
    except CodecError:
        return
    back = affine_of(codec, parts, (N, K))
    assert mine.ordered or not np.array_equal(values(back), values(codes)), codec


def test_conditions_are_named():
    assert str(between("awq.4.g32", "q4_0")) == "exact if all zero points are 0"
    assert "per row" in str(between("q4_0", "compressed.i8"))
    assert between("q8_0", "q4_0").why == "4 bits cannot hold 8-bit codes"
    assert between("q4_0", "awq.4.g32").fate is Fate.EXACT
    assert between("q4_0", "awq.4.g32").conditions == ()
    assert Condition.SCALES_FIT in between("compressed.p4.g32", "q4_0").conditions


def test_the_matrix_has_every_ordered_pair():
    pairs = matrix()
    assert len(pairs) == len(PACKINGS) ** 2
    assert all(p.symbol == "=" for p in pairs if p.have == p.want)
    assert {"from", "to", "fate", "conditions", "why"} == set(pairs.rows()[0])
    assert all(issubclass(polyquant.codec(n).form, Ternary) for n in PACKINGS if n == "tq2_0")


def float_weight(codec, kind):
    """Quantized weights; kind "powers": scales that are powers of two, and a scale of the tensor of 1."""
    rng = np.random.default_rng([len(codec.name), len(kind)])
    w = rng.standard_normal(SHAPE).astype(np.float32) * np.exp(rng.normal(size=(256, 1))).astype(np.float32)
    if kind == "powers":
        w = (rng.choice([0.5, 1, 2, 4, 6], SHAPE) * rng.choice([-1, 1], SHAPE)).astype(np.float32)
        w[:, ::16] = 6
    parts = codec.pack(codec.quantize(w))
    return Weight("w", SHAPE, codec, in_memory(parts))


@pytest.mark.parametrize("have", FLOAT_PACKINGS)
@pytest.mark.parametrize("kind", ["random", "powers"])
def test_cells_of_small_floats(have, kind):
    weight = float_weight(polyquant.codec(have), kind)
    floats = weight.dequantize()
    for target in map(polyquant.codec, FLOAT_PACKINGS):
        found = float_verdict(weight, target)
        assert found is not None
        if target.name == have or not getattr(target, "writable", True):
            continue
        if found.fate is not Fate.IMPOSSIBLE:
            assert between(have, target.name).fate is Fate.EXACT  # under conditions
        try:
            parts = refloated(unfloated(weight.codec, weight.parts, SHAPE), target)
        except CodecError:
            assert found.fate is Fate.IMPOSSIBLE, f"{have} to {target}, {kind}: {found}"
            continue
        back = target.dequantize(parts, SHAPE)
        if found.fate is Fate.EXACT:
            scaled = traits_of(weight.codec).tensor or traits_of(target).tensor
            # the scale of the tensor multiplies, or divides, later: the last bit of a float32
            np.testing.assert_allclose(
                back, floats, rtol=2.5e-7 if scaled else 0, err_msg=f"{have} to {target}, {kind}"
            )
        elif found.fate is Fate.ROUNDED:
            np.testing.assert_allclose(back, floats, rtol=0.01)
