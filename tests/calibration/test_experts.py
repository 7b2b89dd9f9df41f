"""Statistics of experts: only their own tokens, against a loop over tokens, on every golden model with experts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import polyquant as pq
from architectures.golden_models import NAMES, Golden
from polyquant.architectures.find import of_config
from polyquant.calibration.hessians import LEAST_INPUTS, UNREACHED, Hessians, Moments
from polyquant.calibration.importance import load_importance, unreached
from polyquant.calibration.squares import measure
from polyquant.calibration.stages import DecoderStages
from polyquant.calibration.taps import ExpertTap
from polyquant.formats.steps import Step
from polyquant.opening import open_checkpoint
from polyquant.ops import native
from polyquant.ops.experts import route
from polyquant.rows import HeldArray, expert
from polyquant.runtime.expert_linear import ExpertLinear
from polyquant.runtime.load import load
from polyquant.types import Action, TensorMap, Weight

MIXTURES = [
    n for n in NAMES if (r := of_config(Golden(n).config)) and r.runs and r.has_experts and n != "gpt_oss_mxfp4"
]


encodes = pytest.mark.skipif(native.lib() is None, reason="the numpy encoder would take hours")


def windows(model, count=6, length=64, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model.vocab, length) for _ in range(count)]


def routed(model, index, states):
    """Map each expert's matrix to its input rows, token by token in numpy; updates `states`."""
    layer, decoder = model.decoder.layers[index], model.decoder
    found = {}
    seen = []
    part = layer.feed_forward
    plain = type(part).__call__
    for i, x in enumerate(states):
        if part is None:  # hybrids have layers without one
            states[i] = decoder.run_layer(index, x, decoder.cache()).copy()
            continue
        with pytest.MonkeyPatch.context() as patch:
            if part is not None:  # layers of Nemotron-H have one part each
                patch.setattr(type(part), "__call__", lambda self, h: seen.append(h.copy()) or plain(self, h))
            states[i] = decoder.run_layer(index, x, decoder.cache()).copy()
        mixture = (
            part if hasattr(part, "router") else getattr(part, "experts", None)
        )  # Gemma 4's run in parallel to a dense part
        if mixture is None:
            continue
        h = mixture.norm(seen[-1])
        bias = mixture.router.bias[0]
        read = getattr(mixture, "router_norm", mixture.norm)(seen[-1])
        logits = read @ mixture.router.weights[0].dequantize().T + (0 if bias is None else bias)
        ids, weights = route(logits.astype(np.float32), mixture.routing, mixture.bias)
        stacks = (*mixture.gate_up.stacks,)
        matrix = cache(lambda n, e: _matrix(stacks[n], e))  # noqa: B023 - of this state
        for t in range(len(h)):
            for j, e in enumerate(ids[t].tolist()):
                row = h[t] * (weights[t, j] if mixture.weighted == "inputs" else 1)
                first = [matrix(n, e) @ row for n in range(len(stacks))]
                for out, b in zip(first, mixture.gate_up.bias, strict=True):
                    out += 0 if b is None else b[e]
                first = np.split(first[0], 2) if mixture.halves else first
                middle = mixture.activation(*(out[None].astype(np.float32) for out in first))[0]
                for names, x in ((mixture.gate_up.names(e), row), (mixture.down.names(e), middle)):
                    for name in dict.fromkeys(names):
                        found.setdefault(name, []).append(x)
    return {name: np.array(rows) for name, rows in found.items()}


def _matrix(stack, e):
    return (stack[e] if isinstance(stack, (list, tuple)) else expert(stack, e)).dequantize()


@pytest.mark.parametrize("name", MIXTURES)
def test_each_experts_hessian_uses_its_tokens_only(name):
    model = load(Golden(name).folder, activations="float")
    texts = windows(model)
    stages = DecoderStages(model, texts)
    hessians = Hessians(stages, [n for names in stages.names for n in dict.fromkeys(names)])
    states = [next(model.decoder.states(t, model.decoder.cache())).copy() for t in texts]
    checked = 0
    for index in range(len(model.decoder.layers)):
        wanted = routed(model, index, states)
        names = dict.fromkeys(
            n for p in model.decoder.layers[index].stacks for e in range(p.linear.experts) for n in p.linear.names(e)
        )
        assert set(wanted) <= set(names)
        for each in names:
            found, why = hessians.of(each)
            rows = wanted.get(each, ())
            if len(rows) < LEAST_INPUTS:
                assert found is None
                assert (UNREACHED if not len(rows) else f"{len(rows)} inputs seen") in why
                continue
            truth = rows.T.astype(np.float64) @ rows / len(rows)
            np.testing.assert_allclose(found, truth, rtol=1e-4, atol=2e-6 * np.abs(truth).max(), err_msg=each)
            checked += 1
    assert checked >= 6


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_hessian_of_kv_b_covers_the_whole_matrix(name):
    """kv_b_proj, which the decoder multiplies in two other forms."""
    model = load(Golden(name).folder, activations="float")
    texts = windows(model, 2)
    hessians = Hessians(DecoderStages(model, texts), ["model.layers.0.self_attn.kv_b_proj.weight"])
    found, why = hessians.of("model.layers.0.self_attn.kv_b_proj.weight")
    part = model.decoder.layers[0].attention
    x = np.concatenate([next(model.decoder.states(t, model.decoder.cache())) for t in texts])
    read = part.kv_norm(part.first(part.norm(x))[1][:, : part.lora])
    assert why == ""
    np.testing.assert_allclose(found, read.T.astype(np.float64) @ read / len(read), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MIXTURES)
def test_importance_is_the_same_from_a_folder_and_from_gguf(name, tmp_path):
    golden = Golden(name)
    text = tmp_path / "ids.json"
    text.write_text(str([w.tolist() for w in windows(load(golden.folder), 4, 32)]))
    gguf = golden.to_gguf(tmp_path / "model.gguf", exact=True)
    a, b = (measure(open_checkpoint(p), text) for p in (golden.folder, gguf))
    assert set(a) == set(b)
    weights = open_checkpoint(gguf)
    stacks = [n for n in weights if "_exps.weight" in n]
    assert stacks
    assert set(stacks) <= set(a)
    for tensor, summed in a.items():
        shape = weights[tensor].shape
        assert summed.total.shape == ((shape[0] if len(shape) == 3 else 1), shape[-1])
        np.testing.assert_array_equal(summed.counts, b[tensor].counts)
        np.testing.assert_allclose(summed.total, b[tensor].total, rtol=2e-3, atol=1e-5 * summed.total.max())
    used = load(golden.folder).decoder.hyper.count("experts_used")
    assert all(a[n].counts.sum() == 4 * 32 * used for n in stacks)


def test_a_measured_importance_file_lowers_the_output_error(tmp_path):
    """Unreached experts are listed."""
    golden = Golden("qwen3_moe")
    model = load(golden.folder, activations="float")
    text, few = tmp_path / "ids.json", tmp_path / "few.json"
    texts = windows(model, 32, 64)
    text.write_text(str([w.tolist() for w in texts]))
    few.write_text(str([[7] * 70]))
    done = pq.importance(golden.folder, tmp_path / "imatrix.gguf", calibration=text)
    assert (done.tokens, done.unreached) == (32 * 64, {})
    found = load_importance(tmp_path / "imatrix.gguf")
    truth = measure(open_checkpoint(golden.folder), text)
    assert set(found) == set(truth)
    for name, values in found.items():
        np.testing.assert_array_equal(values, truth[name].importance)
    rare = pq.importance(golden.folder, tmp_path / "few.gguf", calibration=few)
    stack = "blk.0.ffn_down_exps.weight"
    assert len(rare.unreached[stack]) >= 1
    assert rare.unreached[stack] == tuple(unreached(load_importance(tmp_path / "few.gguf")[stack]))
    listed = ", ".join(map(str, rare.unreached["blk.0.ffn_gate_exps.weight"]))
    plan = pq.plan(golden.folder, "gguf", codec="iq4_nl", importance=tmp_path / "few.gguf")
    assert any(
        f"reached by no token of the calibration text: their columns have equal importance (first: experts "
        f"{listed} of blk.0" in w
        for w in plan.warnings
    )


def test_inputs_are_kept_if_smaller_than_hessians():
    rng = np.random.default_rng(3)
    f32, shape = pq.codec("f32"), (4, 8, 16)
    parts = f32.pack(f32.quantize(rng.standard_normal(shape).astype(np.float32)))
    held = {key: HeldArray(part) for key, part in parts.items()}
    linear = ExpertLinear([Weight("stack", shape, f32, held)], [None], "none")
    x, ids = rng.standard_normal((10, 16)).astype(np.float32), rng.integers(0, 3, (10, 2)).astype(np.int32)
    names = [f"stack[{e}]" for e in range(4)]
    for tokens, kept in (
        (32, True),
        (33, False),
    ):  # 4 experts of [16, 16] are 64 tokens, and there are `tokens` * 2 rows
        tap = ExpertTap(linear, names, Moments, tokens)
        wide = np.repeat(x, 2, 0)
        tap(wide, ids)
        found = tap.gathered
        assert [bool(found[n]._held) for n in names[:3]] == [kept] * 3
        for e, each in enumerate(names):
            rows = wide[ids.reshape(-1) == e]
            np.testing.assert_allclose(found[each].hessian, rows.T @ rows / max(1, len(rows)), rtol=1e-5, atol=1e-6)
            assert found[each].count == len(rows)


@encodes
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.slow), "deepseek_v3"])
def test_trellis_codes_of_experts_are_searched_with_their_tokens(name, tmp_path):
    """From a folder and from stacked GGUF: the output error falls, and the report lists unreached experts."""
    golden = Golden(name)
    model = load(golden.folder, activations="float")
    text, few = tmp_path / "ids.json", tmp_path / "few.json"
    text.write_text(str([w.tolist() for w in windows(model, 48, 64)]))
    few.write_text(str([[7] * 70]))
    gguf = golden.to_gguf(tmp_path / "model.gguf", exact=True)
    tokens = windows(model, 1, 200, seed=9)[0]
    exact = model.logits(tokens)
    latent = name.startswith("deepseek")  # calibration does not reach its kv_b (transposed in GGUF)
    for source in (golden.folder,) if latent else (golden.folder, gguf):
        errors = {}
        for how in ("plain", "read", "rare"):
            calibration = {"plain": {}, "read": {"calibration": str(text)}, "rare": {"calibration": str(few)}}[how]
            out = tmp_path / f"{source.name}-{how}"
            report = pq.convert(source, out, to="trellis-v3", bits=3, effort="fast", **calibration)
            errors[how] = np.square(load(out, activations="float").logits(tokens) - exact).mean()
            unseen = [s.tensor for s in report.steps if UNREACHED in s.note]
            assert all(".experts." in n for n in unseen)
            assert bool(unseen) == (how == "rare")
        assert errors["read"] < 0.95 * errors["plain"], errors


def test_the_plan_counts_memory_for_experts(tmp_path):
    """A layer like Qwen3-30B-A3B's: 0.5 GiB of inputs for gate and up, Hessians of 768 x 768 for 128 down matrices."""
    f32, experts, hidden, wide = pq.codec("f32"), 128, 2048, 768
    shapes = {"gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide)}

    def memory(count):
        names = [
            (f"model.layers.0.mlp.experts.{e}.{n}.weight", shape) for e in range(count) for n, shape in shapes.items()
        ]
        steps = [Step(TensorMap(n, (n,), s), f32, pq.codec("trellis.3"), Action.QUANTIZE, "", 0) for n, s in names]
        plain = pq.plan(Golden("qwen3_moe").folder, "trellis-v3", bits=3)
        return replace(plain, steps=tuple(steps), text="text").working_memory

    assert memory(experts) - memory(2) == 4 * hidden * 128 * 512 + 4 * experts * wide**2
