"""msModelSlim layers that are slices of one tensor: stacked experts and parts of a fused projection.

The experts have different inputs, the parts of a projection the same.
"""

from types import SimpleNamespace

import numpy as np
import pytest

import polyquant as pq
from folders import fill
from format_modules import gguf
from polyquant.calibration import stages
from polyquant.calibration.hessians import Moments
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.conversion import plan as planning
from polyquant.errors import PlanError, UnsupportedError
from polyquant.formats import smoothing
from polyquant.formats.msmodelslim import keep
from polyquant.formats.msmodelslim.sensitivity import Proposal
from polyquant.operations import SAME, Matrix, Slice, chain
from polyquant.quantizers.affine import quantize_linear
from polyquant.types import Kind, Meta, TensorMap, TensorSpec, Translation

N, K = 16, 64
EXPERT = "model.layers.0.mlp.experts.{}.up_proj"
Q, KV, HALF = (f"model.layers.0.{n}" for n in ("self_attn.q_proj", "self_attn.kv_proj", "mlp.half_proj"))
MADE = {
    **{f"{EXPERT.format(i)}.weight": ("stack", Matrix(i)) for i in range(3)},
    **{f"{EXPERT.format(i)}.bias": ("stack.bias", Matrix(i)) for i in range(3)},
    f"{Q}.weight": ("fused", Slice(0, N)),
    f"{KV}.weight": ("fused", Slice(N, 3 * N)),
    f"{HALF}.weight": ("stack", chain(Matrix(1), Slice(0, N // 2))),
}  # fmt: skip
INPUTS = {"stack[0]": 1.0, "stack[1]": 3.0, "stack[2]": 9.0, "fused": 27.0}
"""Input of a linear layer -> its magnitude.

Matrices of the stack are called as `rows.expert` calls them, which is what a decoder multiplies with.
"""


def values():
    rng = np.random.default_rng(0)
    shapes = {"stack": (3, N, K), "stack.bias": (3, N), "fused": (3 * N, K)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def inputs(name):
    rng = np.random.default_rng(len(name) + int(INPUTS[name]))
    return (INPUTS[name] * rng.standard_normal((100, K))).astype(np.float32)


class Stages:
    """A model of one layer."""

    names = (tuple(INPUTS),)

    def __init__(self, *_, **__):
        pass

    def gather(self, index, wanted, tick, make, cache=None):
        found = {}
        for name in wanted & set(self.names[index]):
            found[name] = make(K)
            found[name].add(inputs(name))
        tick(1.0)
        return found

    def expect(self, requests):
        pass

    def run(self, index, wanted, tick):
        return self.gather(index, wanted, tick, Moments)


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A GGUF with a stack and a fused matrix, which a translation takes apart."""
    found = {}
    for name, w in values().items():
        codec = pq.codec("f32")
        found[name] = SimpleNamespace(shape=w.shape, codec=codec, parts=codec.pack(codec.quantize(w)))
    specs = [TensorSpec(n, w.shape, w.codec) for n, w in found.items()]
    meta = {"general.architecture": Meta(Kind.STRING, "synthetic")}
    fill(gguf.lay_out(specs, meta, name="source.gguf"), tmp_path, found)
    maps = []
    for target, (name, op) in MADE.items():
        shape = op.shape([found[name].shape])
        maps.append(TensorMap(target, (name,), shape, op, keep_float=len(shape) < 2))
    monkeypatch.setattr(planning, "_translate", lambda *_: Translation("synthetic", tuple(maps)))
    monkeypatch.setattr(stages, "calibration_stages", Stages)
    (tmp_path / "text").write_text("calibration text")
    return tmp_path / "source.gguf"


def converted(source, tmp_path, **options):
    pq.convert(pq.plan(source, "msmodelslim", **options), tmp_path / "out")
    return pq.open(tmp_path / "out")


def read_by():
    """Layer -> its input."""
    return {EXPERT.format(i): f"stack[{i}]" for i in range(3)} | {Q: "fused", KV: "fused", HALF: "stack[1]"}


def test_each_expert_has_the_ranges_of_its_inputs(source, tmp_path):
    found = converted(source, tmp_path, codec="w8a8", calibration=str(tmp_path / "text"))
    spans = {}
    for layer, name in read_by().items():
        x, parts = inputs(name), found[f"{layer}.weight"].parts
        low, high = min(x.min(), 0), max(x.max(), 0)
        spans[name] = float(parts["input_scale"][0])
        assert spans[name] == pytest.approx((high - low) / 255, rel=1e-3)
    assert len(set(spans.values())) == len(INPUTS)
    for i in range(3):  # its own bias too, in the sums
        codes = found[f"{EXPERT.format(i)}.weight"].codec.unpack(found[f"{EXPERT.format(i)}.weight"].parts, (N, K))
        grid = codes.activation
        expected = values()["stack.bias"][i] / grid.deq_scale - grid.offset[0] * codes.codes.sum(1, dtype=np.int64)
        np.testing.assert_allclose(grid.quant_bias, expected, atol=1)


def test_each_expert_is_searched_with_its_inputs(source, tmp_path):
    """And parts of one fused matrix, or rows of one expert, each on the inputs that they share."""
    found = converted(source, tmp_path, codec="w4a16", calibration=str(tmp_path / "text"), effort="max")
    floats = values()
    for layer, name in read_by().items():
        weight, x = found[f"{layer}.weight"], inputs(name)
        map_name, op = MADE[f"{layer}.weight"]
        w = np.ascontiguousarray(op.reference([floats[map_name]]))
        h = x.T @ x / np.float32(len(x))
        assert isinstance(weight.codec, MsModelSlim)
        best = weight.codec.pack(quantize_linear(weight.codec, w, hessian=h, effort="max"))
        np.testing.assert_array_equal(best["weight"], weight.parts["weight"])


def test_ranges_name_experts_like_the_folder_or_the_source(source, tmp_path):
    given = {EXPERT.format(0): (-1, 1), "stack[1]": (-2, 2), EXPERT.format(2): (-4, 4), "fused": (-8, 8)}
    found = converted(source, tmp_path, codec="w8a8", ranges=given)
    scales = [float(found[f"{EXPERT.format(i)}.weight"].parts["input_scale"][0]) for i in range(3)]
    np.testing.assert_allclose(scales, [2 / 255, 4 / 255, 8 / 255], rtol=1e-2)
    del given[EXPERT.format(2)]
    with pytest.raises(
        PlanError, match=r"experts\.2\.up_proj\.weight: --ranges has no entry for 1 layers.*--keep 'model.*experts\.2"
    ):
        pq.plan(source, "msmodelslim", codec="w8a8", ranges=given)


def test_keep_auto_keeps_the_worst_expert(source, tmp_path, monkeypatch):
    monkeypatch.setattr(keep, "propose_keep", lambda *_: Proposal(("stack[1]", "fused"), {}, 1.0, 0.0))
    found = converted(source, tmp_path, codec="w8a16", calibration=str(tmp_path / "text"), keep=("auto",))
    floats = {layer for layer in read_by() if found[f"{layer}.weight"].codec.name == "f32"}
    assert floats == {EXPERT.format(1), HALF, Q, KV}


def test_rows_of_several_experts_have_no_common_inputs(source, monkeypatch):
    mixed = Translation(
        "synthetic",
        (
            TensorMap(f"{Q}.weight", ("stack",), (2, K), chain(Matrix(0), Slice(0, 2))),
            TensorMap(f"{KV}.weight", ("stack",), (2 * N, K), Folded()),
        ),
    )
    monkeypatch.setattr(planning, "_translate", lambda *_: mixed)
    with pytest.raises(
        UnsupportedError, match=r"kv_proj.*rows of several matrices of a stack.*found 2 matrices of stack"
    ):
        pq.plan(source, "trellis-v3", bits=2, calibration="self")


class Folded(Slice):
    """The first two matrices as one."""

    def __init__(self):
        super().__init__(0, 2)

    def shape(self, shapes, tensor=""):
        return (2 * N, K)

    def needs(self, rows, shapes):
        return (rows,)


def test_a_whole_stack_stays_float_with_a_reason(source, monkeypatch):
    name = "model.layers.0.mlp.experts.up_proj.weight"
    maps = (TensorMap(name, ("stack",), (3, N, K), SAME), TensorMap(f"{Q}.weight", ("fused",), (3 * N, K)))
    monkeypatch.setattr(planning, "_translate", lambda *_: Translation("synthetic", maps))
    plan = pq.plan(source, "msmodelslim", codec="w8a16")
    (step,) = (s for s in plan.steps if s.map.target == name)
    assert step.target.name == "f32" and step.why == "a stack: the format supports only matrices"
    assert any("more than two dimensions stay float" in w for w in plan.warnings)


def test_smoothing_keeps_the_bias_of_other_layers():
    found = smoothing.Smoothing(SimpleNamespace(), "m1")
    bias = np.ones((3, N), np.float32)
    assert found.bias("stack", bias) is bias and found.bias("stack", None) is None
