"""Smoothing and calibration of expert layers: one norm feeds all experts and the router; inputs differ per expert."""

from __future__ import annotations

import json

import numpy as np
import pytest

import polyquant as pq
from architectures.golden_models import Golden
from calibration.test_experts import MIXTURES
from formats.test_msmodelslim_smooth import float32
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import UnsupportedError
from polyquant.formats.linears import is_linear
from polyquant.formats.msmodelslim.options import MsModelSlimOptions
from polyquant.formats.msmodelslim.prepare import prepare
from polyquant.formats.smoothing import expert_families, links, unsmoothed
from polyquant.opening import open_checkpoint

STACKED = {"gemma4", "gpt_oss", "granitemoe", "granitemoehybrid", "granitemoeshared", "llama4"}
"""Folders that hold all experts in one tensor."""
APART = [n for n in MIXTURES if n not in STACKED]
FROM_ONE = {"qwen3_5_moe", "qwen3_next"}
"""Their norms are stored as the distance from one, which no scale divides."""
UNGATED = {"nemotron_h"}
"""The square between the matrices of its experts does not commute with a scale."""
QUICK = ("qwen3_moe",)
"""In `make check-slow` the others go through the same code."""


def calibrated(folder, ids, codec="w8a8", **options):
    source = open_checkpoint(folder)
    targets = {n: MsModelSlim(codec) for n, w in source.items() if is_linear(n, w.shape)}
    wanted = MsModelSlimOptions(calibration=str(ids), **options)
    return source, prepare(source, wanted, targets.items(), lambda _: None)


def texts(path, vocab, count=16, length=64, seed=1):
    path.write_text(json.dumps(np.random.default_rng(seed).integers(0, vocab, (count, length)).tolist()))
    return path


def vocab(folder):
    return pq.load(folder).vocab


@pytest.mark.parametrize("name", sorted(FROM_ONE))
def test_a_model_without_smoothable_norms_is_refused(name):
    with pytest.raises(UnsupportedError, match="found no norms"):
        links(open_checkpoint(Golden(name).folder), "m1")


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(n, m, marks=[pytest.mark.slow] if m == "m1" and n not in QUICK else [])
        for n in MIXTURES
        for m in ("m1", "m4")
        if n not in FROM_ONE or m == "m4"
    ],
)
def test_smoothing_keeps_the_outputs_of_a_mixture(name, method, tmp_path):
    """Its router too: its weights grow by powers of two, which bfloat16 does not round."""
    plain = float32(Golden(name).folder, tmp_path / "plain")
    source, found = calibrated(plain, texts(tmp_path / "ids.json", vocab(plain)), smooth=method)
    smoothed = float32(plain, tmp_path / "smoothed", lambda n, w: found.values.get(n, found.weight(n, w)))
    tokens = np.random.default_rng(2).integers(0, vocab(plain), 48)
    before, after = (pq.load(path, activations="float").logits(tokens) for path in (plain, smoothed))
    layers = len(pq.load(plain).decoder.layers)
    assert np.abs(after - before).max() < max(1e-5, 1e-6 * layers) * np.abs(before).max()
    changed = [n for n in source if found.changes(n)]
    experts = {n for n in expert_families(source) if "[" not in n}
    assert bool(experts & set(changed)) == (name in APART)
    for link in (link for link in links(source, method) if set(link.readers) & experts and link.norm):
        scales = [found.weight(r, np.ones((1, source[r].shape[1]), np.float32))[0] for r in link.readers]
        for scale in scales:  # one for all that read the norm; with m4 the rows of `up` are divided too
            np.testing.assert_allclose(scale / scale[0], scales[0] / scales[0][0], rtol=1e-6)
        assert (np.exp2(np.rint(np.log2(scales[0]))) == scales[0]).all()
        assert np.ptp(scales[0]) > 0
        router = source[link.readers[0]]
        assert not is_linear(link.readers[0], router.shape)
    if method == "m4" and name in APART and name not in UNGATED:
        own = [link for link in links(source, "m4") if link.routed and found.changes(link.feeder)]
        scales = [found.weight(x.readers[0], np.ones((1, source[x.readers[0]].shape[1]), np.float32)) for x in own]
        scaled = [scale for scale in scales if np.ptp(scale)]  # an expert that few tokens reach keeps its own
        assert len(scaled) > len(own) / 2
        assert len({scale.tobytes() for scale in scaled}) == len(scaled)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_norms_that_cannot_be_smoothed_are_named(name, tmp_path):
    folder = Golden(name).folder
    ids = texts(tmp_path / "ids.json", vocab(folder))
    plan = pq.plan(folder, "msmodelslim", codec="w8a8", smooth="shift", calibration=str(ids))
    why = "contains all experts in one tensor" if name in STACKED else "no bias to absorb a shift"
    assert any("3 norms before experts are not smoothed" in w and why in w for w in plan.warnings)
    assert (unsmoothed(open_checkpoint(folder), "m1") == {}) == (name in APART)


def with_outliers(folder, out):
    """Return the same model with 40-fold outlier channels between producers and consumers, as in trained models."""
    plain = open_checkpoint(folder)
    arrays = {n: w.dequantize() for n, w in plain.items()}
    for link in links(plain, "m4"):
        feeder, width = arrays[link.feeder], plain[link.readers[0]].shape[1]
        chosen = np.random.default_rng(width).choice(width, 3, replace=False)
        if link.heads is not None:
            continue
        feeder[(link.start or 0) + chosen] *= 40
        for reader in link.readers:
            arrays[reader][:, chosen] /= 40
    return float32(folder, out, lambda n, w: arrays[n])


CASES = [("w8a8", "m1", 0.6), ("w8a8", "m4", 0.1), ("w8a8.dynamic", "m1", 0.9), ("w8a8.dynamic", "m4", 0.1)]


@pytest.mark.parametrize(("codec", "method", "most"), CASES)
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in ("mixtral", "qwen2_moe", "olmoe"))]
)
def test_smoothing_lowers_the_output_error_with_outlier_channels(name, codec, method, most, tmp_path):
    folder = with_outliers(Golden(name).folder, tmp_path / "model")
    ids = texts(tmp_path / "ids.json", vocab(folder), 32)
    tokens = np.random.default_rng(7).integers(0, vocab(folder), 200)
    exact = pq.load(folder, activations="float").logits(tokens)
    errors = {}
    for smooth in (None, method):
        out = tmp_path / f"out-{smooth}"
        text = {"calibration": str(ids)} if smooth or codec == "w8a8" else {}
        pq.convert(folder, out, to="msmodelslim", codec=codec, smooth=smooth, **text)
        errors[smooth] = float(np.square(pq.load(out).logits(tokens) - exact).mean())
    assert errors[method] < most * errors[None], errors


@pytest.mark.parametrize("name", APART)
def test_each_expert_has_a_range_and_rare_ones_share_it(name, tmp_path):
    folder = Golden(name).folder
    ids = texts(tmp_path / "ids.json", vocab(folder), 2, 40)
    source, found = calibrated(folder, ids)
    families = expert_families(source)
    rare = {n: why for n, why in found.notes.items() if n in families}
    assert rare
    for each, why in rare.items():
        low, high = found.input_range(each)
        assert low < high
        assert "the range includes the inputs of the other experts of its layer" in why
        often = [n for n in families[each] if n not in rare]
        for n in often:
            a, b = found.input_range(n)
            assert low <= a
            assert b <= high
    out = tmp_path / "out"
    report = pq.convert(folder, out, to="msmodelslim", codec="w8a8", calibration=str(ids))
    assert {s.tensor for s in report.steps if s.note} == set(found.notes)
    assert np.isfinite(pq.load(out).logits([1, 2, 3])).all()


def test_effort_max_searches_each_expert_with_its_tokens(tmp_path):
    """The output error on an expert's own inputs falls for every expert with enough tokens, smoothed or not."""
    folder = Golden("qwen3_moe").folder
    ids = texts(tmp_path / "ids.json", vocab(folder), 48)
    for smooth in (None, "m4"):
        _, found = calibrated(folder, ids, "w4a16", effort="max", smooth=smooth)
        plain, best = tmp_path / f"plain-{smooth}", tmp_path / f"best-{smooth}"
        text = {"calibration": str(ids), "smooth": smooth} if smooth else {}
        pq.convert(folder, plain, to="msmodelslim", codec="w4a16", **text)
        pq.convert(folder, best, to="msmodelslim", codec="w4a16", effort="max", calibration=str(ids), smooth=smooth)
        source, a, b = (open_checkpoint(p) for p in (folder, plain, best))
        wins = []
        for name in expert_families(source):
            h = found.hessian(name)
            if h is None:
                continue
            w = found.weight(name, source[name].dequantize())
            costs = [float(((e @ h) * e).sum()) for e in (x[name].dequantize() - w for x in (b, a))]
            wins.append(costs[0] / costs[1])
        assert len(wins) > 40
        assert np.mean(np.array(wins) < 1) > 0.95
        assert np.exp(np.mean(np.log(wins))) < 0.8
