"""Conversions with derived tensors: stacked experts, split projections, interleaving, transposes, shifted norms."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import packers
import polyquant as pq
from folders import fill
from format_modules import gguf
from polyquant.analysis.compare import compare_checkpoints
from polyquant.architectures import translate
from polyquant.conversion import plan as planning
from polyquant.conversion import work
from polyquant.errors import InputError, PlanError, UnsupportedError
from polyquant.formats import steps
from polyquant.formats.actions import action_of
from polyquant.formats.gguf.target import GGUFTarget
from polyquant.formats.steps import Step
from polyquant.operations import (
    SAME,
    AddConstant,
    Concat,
    Interleave,
    Operation,
    Rows,
    Slice,
    Stack,
    Transpose,
    chain,
)
from polyquant.ops.metrics import error_sums
from polyquant.recipes.recipe import Facts, Recipe
from polyquant.rows import in_memory
from polyquant.types import Action, Checkpoint, Kind, Meta, TensorMap, TensorSpec, Translation, Weight

QKV = Rows(np.arange(64).reshape(2, 2, 16).swapaxes(1, 2).reshape(-1))
SHAPES = {f"e{i}": (64, 256) for i in range(3)} | {
    "qkv": (128, 256), "qkv.bias": (128,), "norm": (256,), "turned": (2, 256, 256), "gate": (2, 64, 256),
    "up": (2, 64, 256),
}  # fmt: skip
MADE: dict[str, tuple[tuple[str, ...], Operation]] = {
    "experts": (("e0", "e1", "e2"), Stack()),
    "q": (("qkv",), chain(Slice(0, 64), QKV)),
    "kv": (("qkv",), Slice(64, 128)),
    "q.bias": (("qkv.bias",), chain(Slice(0, 64), QKV)),
    "shifted": (("norm",), AddConstant(1.0)),
    "turned": (("turned",), Transpose()),
    "gate_up": (("gate", "up"), Interleave(1)),
    "behind": (("e1", "e0"), Concat()),
    "alone": (("e2",), SAME),
}
KEEPS = {"experts", "q", "kv", "gate_up", "behind", "alone"}


def values():
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def source(folder, codec, other=None):
    """A GGUF whose matrices have that codec; `other`: exceptions, name -> codec."""
    found = {}
    for name, w in values().items():
        kind = pq.codec((other or {}).get(name, codec if w.ndim > 1 else "f32"))
        found[name] = SimpleNamespace(shape=w.shape, codec=kind, parts=kind.pack(kind.quantize(w)))
    layout = gguf.lay_out(
        [TensorSpec(n, w.shape, w.codec) for n, w in found.items()],
        {"general.architecture": Meta(Kind.STRING, "synthetic")},
        name="source.gguf",
    )
    fill(layout, folder, found)
    return folder / "source.gguf"


def translation(checkpoint, made):
    maps = []
    for target, (names, op) in made.items():
        shape = op.shape([checkpoint[n].shape for n in names], target)
        maps.append(TensorMap(target, names, shape, op, keep_float=len(shape) < 2))
    return Translation("synthetic", tuple(maps), metadata={"general.architecture": Meta(Kind.STRING, "synthetic")})


@pytest.fixture
def remade(tmp_path, monkeypatch):
    """convert(source, made, **options) -> (plan, opened target)."""

    def convert(path, made=MADE, block=None, to="gguf", **options):
        monkeypatch.setattr(planning, "_translate", lambda found, *_: translation(found, made))
        if block is not None:
            monkeypatch.setattr(steps, "BLOCK_WEIGHTS", block)
        plan = pq.plan(path, to, **options)
        target = tmp_path / f"out-{len(list(tmp_path.iterdir()))}{'.gguf' if to == 'gguf' else ''}"
        report = pq.convert(plan, target)
        return plan, report, pq.open(target)

    return convert


def expected(path, name, made=MADE):
    """The floats that the operation makes of the source's."""
    names, op = made[name]
    found = pq.open(path)
    return np.asarray(op.reference([found[n].dequantize() for n in names]), np.float32)


@pytest.mark.parametrize("block", [None, 1, 5000])
@pytest.mark.parametrize("codec", ["f32", "bf16", "q8_0", "q4_k"])
def test_unchanged_rows_are_copied(tmp_path, remade, codec, block):
    path = source(tmp_path, codec)
    plan, _, made = remade(path, block=block)
    actions = {s.map.target: s.action.value for s in plan.steps}
    for name in MADE:
        w = made[name]
        if name in KEEPS:
            assert actions[name] == "copy" and w.codec.name == codec
        truth = expected(path, name)
        if name == "turned" and codec in ("q8_0", "q4_k"):  # columns are rows: no code survives
            assert (actions[name], w.codec.name) == ("dequantize", "bf16")
            assert error_sums(truth, w.dequantize()).rrmse < 4e-3
        else:
            np.testing.assert_array_equal(w.dequantize(), truth, err_msg=name)


@pytest.mark.parametrize("target", ["f32", "bf16", "q8_0", "q4_k"])
@pytest.mark.parametrize("codec", ["f32", "bf16"])
def test_floats_are_encoded_like_the_computed_tensor(tmp_path, remade, codec, target):
    path = source(tmp_path, codec)
    _, report, made = remade(path, codec=target, block=5000)
    _, _, again = remade(path, codec=target, block=1)
    wanted = pq.codec(target)
    for step in report.steps:
        w, truth = made[step.tensor], expected(path, step.tensor)
        kind = wanted if truth.ndim > 1 else pq.codec("f32")
        parts = kind.pack(kind.quantize(truth))
        np.testing.assert_array_equal(w.parts["blocks"].reshape(-1), parts["blocks"].reshape(-1), err_msg=step.tensor)
        np.testing.assert_array_equal(again[step.tensor].parts["blocks"], w.parts["blocks"])
        if step.error is not None:
            assert step.error.count == truth.size
            assert step.error.dd == pytest.approx(error_sums(truth, w.dequantize()).dd, rel=1e-6)


@pytest.mark.parametrize("block", [1, 3000])
def test_quantized_sources_of_other_codecs_need_requantize(tmp_path, remade, block):
    path = source(tmp_path, "q8_0")
    with pytest.raises(PlanError, match="--requantize"):
        remade(path, codec="q4_k")
    _, _, made = remade(path, codec="q4_k", requantize=True, block=block)
    truth = expected(path, "experts")
    kind = pq.codec("q4_k")
    np.testing.assert_array_equal(made["experts"].parts["blocks"], kind.pack(kind.quantize(truth))["blocks"])


def test_sources_of_several_codecs(tmp_path, remade):
    """Floats of several types are joined exactly; codes of several types only on request, or as floats."""
    only = {"experts": MADE["experts"]}
    mixed = source(tmp_path / "a", "f32", {"e0": "bf16", "e1": "f16", "e2": "bf16"})
    plan, _, made = remade(mixed, only)
    assert (plan.steps[0].target.name, plan.steps[0].action.value) == ("f32", "transcode")
    np.testing.assert_array_equal(made["experts"].dequantize(), expected(mixed, "experts"))
    codes = source(tmp_path / "b", "q8_0", {"e1": "q4_k"})
    plan, _, made = remade(codes, only)
    assert (plan.steps[0].target.name, plan.steps[0].action.value) == ("bf16", "dequantize")
    with pytest.raises(PlanError, match=r"requantize|e0 and 2 more"):
        remade(codes, only, codec="q8_0")


def test_ternary_stacks(tmp_path, remade):
    """Experts with separate scales: kept by block scales, refused for a single scale."""
    rng = np.random.default_rng(0)
    codes = [rng.integers(-1, 2, (64, 256)).astype(np.float32) for _ in range(3)]
    found = {}
    for i, c in enumerate(codes):
        kind = pq.codec("i2_s.x86")
        w = c * np.float32(0.5 * (i + 1))
        found[f"e{i}"] = SimpleNamespace(shape=w.shape, codec=kind, parts=kind.pack(kind.quantize(w)))
    specs = [TensorSpec(n, w.shape, w.codec) for n, w in found.items()]
    fill(gguf.lay_out(specs, {"general.architecture": Meta(Kind.STRING, "x")}, name="source.gguf"), tmp_path, found)
    path, only = tmp_path / "source.gguf", {"experts": MADE["experts"]}
    plan, _, made = remade(path, only, codec="tq2_0", ternary_layout="i2_s.x86")
    assert plan.steps[0].action.value == "transcode"
    truth = np.stack([c * np.float32(0.5 * (i + 1)) for i, c in enumerate(codes)])
    np.testing.assert_array_equal(made["experts"].dequantize(), truth)
    with pytest.raises(PlanError, match=r"e0 and 2 more: .*one scale per tensor"):
        remade(path, only, ternary_layout="i2_s.x86")


def test_a_different_operation_is_a_different_job(tmp_path, remade):
    path = source(tmp_path, "f32")
    a = remade(path, {"q": (("qkv",), Slice(0, 64))})[0]
    b = remade(path, {"q": (("qkv",), Slice(64, 128))})[0]
    assert a.fingerprint != b.fingerprint


def test_errors_name_the_first_source_and_how_many_more(tmp_path, remade):
    path = source(tmp_path, "f32")
    raw = bytearray(path.read_bytes())
    raw[-64 * 256 * 4 * 2 - 4 :] = b"\xff" * (64 * 256 * 4 * 2 + 4)  # NaN in `up`, the last
    path.write_bytes(raw)
    with pytest.raises(InputError, match=r"gate and 1 more: q8_0 cannot quantize NaN or infinity"):
        remade(path, {"gate_up": MADE["gate_up"]}, codec="q8_0")


def test_a_translation_with_the_wrong_shape_is_refused(tmp_path, monkeypatch):
    path = source(tmp_path, "f32")
    wrong = Translation("x", (TensorMap("q", ("qkv",), (64, 255), Slice(0, 64)),))
    monkeypatch.setattr(planning, "_translate", lambda *_: wrong)
    with pytest.raises(
        InputError, match=r"q: its sources give a different shape .*expected \[64, 255\], found \[64, 256\]"
    ):
        pq.plan(path, "gguf")


def test_single_source_operations_refuse_several():
    made = TensorMap("experts", ("e0", "e1"), (2, 64, 256), Stack())
    with pytest.raises(UnsupportedError, match=r"experts: is made of several tensors.*e0 and 1 more"):
        made.source  # noqa: B018


@pytest.mark.parametrize("codec", ["q4_k", "q8_0", "iq4_xs", "q4_0"])
def test_each_expert_is_quantized_with_its_importance(tmp_path, remade, codec):
    path = source(tmp_path, "f32")
    importance = np.random.default_rng(1).gamma(0.3, 1.0, (3, 256)).astype(np.float32) + np.float32(1e-3)
    kind, truth = pq.codec(codec), expected(path, "experts")
    for block in (1, 5000, 1 << 20):
        _, _, made = remade(
            path, {"experts": MADE["experts"]}, codec=codec, importance={"experts": importance}, block=block
        )
        each = [kind.pack(kind.quantize(truth[i], importance=importance[i]))["blocks"] for i in range(3)]
        np.testing.assert_array_equal(made["experts"].parts["blocks"].reshape(-1), np.concatenate(each).reshape(-1))
    one = importance[0]
    _, _, made = remade(path, {"experts": MADE["experts"]}, codec=codec, importance={"experts": one})
    shared = kind.pack(kind.quantize(truth, importance=one))["blocks"]
    np.testing.assert_array_equal(made["experts"].parts["blocks"].reshape(-1), shared.reshape(-1))


def test_experts_that_no_token_reached_are_counted(tmp_path, remade):
    importance = np.random.default_rng(2).gamma(0.3, 1.0, (3, 256)).astype(np.float32)
    importance[1] = 1  # the result of load_importance for a count of 0
    made = {"experts": MADE["experts"]}
    plan, _, _ = remade(source(tmp_path, "f32"), made, codec="q4_k", importance={"experts": importance})
    assert sum("1 experts of 1 stacks were reached by no token" in w for w in plan.warnings) == 1


def test_importance_of_the_wrong_number_of_experts_is_refused(tmp_path, remade):
    path = source(tmp_path, "f32")
    for shape in ((2, 256), (3, 128), (255,)):
        with pytest.raises(PlanError, match=r"experts: importance does not match the length .*\[256\] or \[3, 256\]"):
            remade(path, {"experts": MADE["experts"]}, codec="q4_k", importance={"experts": np.ones(shape, np.float32)})


def test_blocks_of_a_transposed_stack_are_whole_matrices(monkeypatch):
    monkeypatch.setattr(steps, "BLOCK_WEIGHTS", 1)
    f32 = pq.codec("f32")
    made = TensorMap("x", ("x",), (8, 32, 16), Transpose())
    step = Step(made, f32, f32, Action.TRANSCODE, "", 0, sources=(TensorSpec("x", (8, 16, 32), f32),))
    assert step.streams and step.block_rows == 32


def test_compare_computes_tensors_with_several_sources(tmp_path, remade, monkeypatch):
    """Compare the float source, translated to the target's names, with the output."""
    path = source(tmp_path, "f32")
    _, report, made = remade(path, codec="q8_0")
    truth = pq.open(path)
    folder = Checkpoint("hf", truth.path, truth.weights)
    monkeypatch.setattr(translate, "to_gguf", lambda found, **_: translation(found, MADE))
    found = compare_checkpoints(folder, made)
    assert {t.name for t in found.tensors} == set(MADE) and not found.only_a and not found.only_b
    measured = {s.tensor: s.error for s in report.steps}
    for t in found.tensors:
        assert t.error.count == np.prod(t.shape)
        if measured[t.name] is not None:
            assert t.error.dd == pytest.approx(measured[t.name].dd, rel=1e-6)


def trellis_source(folder, monkeypatch, made):
    """A folder whose tensors are made of a GGUF's, by names of linear layers."""
    path = source(folder, "f32")
    monkeypatch.setattr(planning, "_translate", lambda found, *_: translation(found, made))
    return path


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ((("e0", "e1"), Concat()), r"q_proj\.weight: is made of several tensors.*e0 and 1 more"),
        ((("e0",), Transpose()), r"q_proj\.weight: has other columns than its source.*found e0"),
    ],
)
def test_calibration_needs_the_inputs_of_one_source(tmp_path, monkeypatch, made, message):
    name = "model.layers.0.self_attn.q_proj.weight"
    path = trellis_source(tmp_path, monkeypatch, {name: made})
    with pytest.raises(UnsupportedError, match=message):
        pq.plan(path, "trellis-v3", bits=2, calibration="self")


def test_trellis_codes_of_a_computed_tensor(tmp_path, monkeypatch):
    """Searched as those of the whole; the size of the original is that of its part."""
    made = {
        "model.layers.0.self_attn.q_proj.weight": MADE["q"],
        "model.layers.0.mlp.up_proj.weight": (("e0", "e1"), Concat()),
    }
    path = trellis_source(tmp_path / "a", monkeypatch, made)
    report = pq.convert(pq.plan(path, "trellis-v3", bits=4, effort="fast"), tmp_path / "out")
    found = pq.open(tmp_path / "out")
    said = json.loads((tmp_path / "out" / "quantization_config.json").read_text())["tensor_metadata"]
    for step in report.steps:
        truth = expected(path, step.tensor, made)
        assert error_sums(truth, found[step.tensor].dequantize()).snr > 17
        assert said[step.tensor]["original_bytes"] == truth.nbytes


def gptq_weight(name, seed, zero):
    """4-bit codes [32, 64] in groups of 32, all with that zero, as AutoGPTQ stores them."""
    rng = np.random.default_rng(seed)
    codes, zeros = rng.integers(0, 16, (32, 64)), np.full((32, 2), zero)
    parts = packers.gptq(codes, zeros, rng.random((32, 2)) + 0.5, 4)
    return Weight(name, (32, 64), pq.codec("gptq.4.g32"), in_memory(parts))


@pytest.mark.parametrize(("zeros", "wanted"), [((8, 8, 8), "q4_0"), ((8, 3, 8), "q4_1")])
@pytest.mark.parametrize("op", [Stack(), Concat(), chain(Stack(), Slice(4, 20, axis=1))])
def test_codes_of_other_tools_are_copied_into_one_stack(op, zeros, wanted):
    """The smallest block type that holds the codes of all; each source keeps its scales."""
    weights = [gptq_weight(f"e{i}", i, zero) for i, zero in enumerate(zeros)]
    held = Checkpoint("hf", Path("x"), {w.name: w for w in weights})
    made = TensorMap("experts", ("e0", "e1", "e2"), op.shape([w.shape for w in weights]), op)
    gguf_target = GGUFTarget()
    chosen = gguf_target.choose(held, made, Recipe("as the source"), Facts(), gguf_target.options())
    target, why = chosen.codec, chosen.why
    assert (target.name, why) == (wanted, "codes kept")
    action = action_of(weights, target, made)
    assert action is Action.TRANSCODE
    specs = tuple(TensorSpec(w.name, w.shape, w.codec) for w in weights)
    step = Step(made, weights[0].codec, target, action, why, 0, sources=specs)
    assert list(work.blocks(step)) == [None]
    (piece,) = work.convert_tensor(SimpleNamespace(source=held, importance={}), step, measure=True)
    found = target.dequantize(piece.parts, made.shape)
    np.testing.assert_allclose(found, op.reference([w.dequantize() for w in weights]), rtol=2e-3, atol=2e-2)
    assert piece.error.count == found.size and piece.error.rrmse < 1e-3


def test_ternaries_of_several_layouts_are_joined_by_code(tmp_path, remade):
    w = {n: np.sign(a) for n, a in values().items() if n in ("e0", "e1", "e2")}
    found = {}
    for name, codec in (("e0", "tq1_0"), ("e1", "tq2_0"), ("e2", "tq1_0")):
        kind = pq.codec(codec)
        found[name] = SimpleNamespace(shape=w[name].shape, codec=kind, parts=kind.pack(kind.quantize(w[name])))
    specs = [TensorSpec(n, f.shape, f.codec) for n, f in found.items()]
    fill(gguf.lay_out(specs, {"general.architecture": Meta(Kind.STRING, "x")}, name="source.gguf"), tmp_path, found)
    plan, _, made = remade(tmp_path / "source.gguf", {"experts": MADE["experts"]}, codec="tq2_0")
    assert plan.steps[0].action is Action.TRANSCODE
    np.testing.assert_array_equal(made["experts"].dequantize(), np.stack([w[f"e{i}"] for i in range(3)]))
