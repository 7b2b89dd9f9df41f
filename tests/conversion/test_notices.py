"""Notices of a plan: rules that match nothing or part of a stack, and stacks with several codecs."""

from __future__ import annotations

import numpy as np
import pytest

import polyquant as pq
from architectures.golden_models import Golden
from polyquant.errors import PlanError
from polyquant.types import Action

FOLDER = Golden("qwen3_moe").folder
ONE = "model.layers.0.mlp.experts.3.gate_proj.weight"


def said(words, *args, **options):
    return [w for w in pq.plan(*args, **options).warnings if words in w]


def test_a_rule_that_matches_nothing_is_reported():
    (warning,) = said("matches no tensor", FOLDER, "gguf", codec="q4_0", rules=["nosuch*=q8_0", "*attn_q*=q8_0"])
    assert warning.startswith("--rule nosuch*=q8_0 matches no tensor; tensor names look like ")
    (warning,) = said("matches no tensor", FOLDER, "gguf", codec="q4_0", rules=["attn_q=q8_0"])
    assert warning.startswith("--rule attn_q=q8_0 matches no tensor; *attn_q*=q8_0 matches ")
    assert not said(
        "--rule", FOLDER, "gguf", codec="q4_0", rules=["blk.1.ffn_down_exps.weight=q8_0", "*.q_proj.weight=q8_0"]
    )


def test_a_rule_for_one_expert_applies_to_its_stack_with_a_notice():
    plan = pq.plan(FOLDER, "gguf", codec="q4_0", rules=[f"{ONE}=q8_0"])
    stack = next(s for s in plan.steps if s.map.target == "blk.0.ffn_gate_exps.weight")
    assert stack.target.name == "q8_0"
    (warning,) = [w for w in plan.warnings if "--rule" in w]
    assert "matches 1 of the 8 experts of blk.0.ffn_gate_exps.weight" in warning and "all get q8_0" in warning
    (many,) = said("--rule", FOLDER, "gguf", codec="q4_0", rules=["*experts.[01].*=q8_0"])
    assert "2 of the 8 experts" in many and "same for 8 more stacks" in many
    assert not said("--rule", FOLDER, "gguf", codec="q4_0", rules=["*experts.*=q8_0"])


def test_rules_by_expert_apply_to_separate_experts(tmp_path):
    rules = ["*experts.3.gate_proj*=w4a8.dynamic"]
    assert not said("--rule", FOLDER, "msmodelslim", codec="w8a8.dynamic", rules=rules)
    pq.convert(FOLDER, tmp_path / "mixed", to="msmodelslim", codec="w8a8.dynamic", rules=rules)
    mixed = pq.open(tmp_path / "mixed")
    assert mixed[ONE].codec.name.startswith("w4a8") and mixed[ONE.replace("3", "2")].codec.name == "w8a8.dynamic"
    (warning,) = said("join experts of several codecs", tmp_path / "mixed", "gguf")
    assert warning.startswith("3 stacks") and "w8a8.dynamic become q8_0" in warning
    assert not said("join experts", FOLDER, "gguf", codec="q4_0")


def test_a_codec_whose_blocks_do_not_fit_the_rows_is_reported(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"a.weight": rng.standard_normal((8, 96)), "b.weight": rng.standard_normal((8, 256))}
    arrays = {name: w.astype(np.float32) for name, w in arrays.items()}
    report = pq.save(arrays, tmp_path / "a.gguf", codec="q4_k")
    assert report.warnings == ("a.weight becomes q5_0: rows of 96 values do not divide into blocks of q4_k",)
    report = pq.save({**arrays, "c.weight": arrays["a.weight"]}, tmp_path / "b.gguf", codec="q4_k")
    assert report.warnings[0].startswith("a.weight becomes q5_0, and 1 more tensor: ")
    assert not pq.save(arrays, tmp_path / "c.gguf", codec="q8_0").warnings


@pytest.mark.parametrize("name", ["i2_s.x86", "tl1"])
def test_block_scales_that_one_scale_cannot_replace_are_refused_by_the_plan(tmp_path, name):
    w = np.tile(np.array([0, 1, -1, 1], np.float32), (256, 64))
    pq.save({"blk.0.ffn_up.weight": w}, tmp_path / "equal.gguf", codec="tq2_0")
    pq.save(
        {"blk.0.ffn_up.weight": w * np.linspace(1, 2, 256, dtype=np.float32)[:, None]},
        tmp_path / "rows.gguf",
        codec="tq2_0",
    )
    options = {"codec": name, "tile": (128, 64, 32)} if name == "tl1" else {"codec": name}
    assert pq.plan(tmp_path / "equal.gguf", "gguf", **options).steps[0].action is Action.TRANSCODE
    with pytest.raises(PlanError, match=r"has one scale per tensor.*scales from 1 to 2"):
        pq.plan(tmp_path / "rows.gguf", "gguf", **options)
    w[100] *= 3
    pq.save({"blk.0.ffn_up.weight": w}, tmp_path / "inside.gguf", codec="tq2_0")
    with pytest.raises(PlanError, match=r"has one scale per tensor.*scales from 1 to 3"):
        pq.plan(tmp_path / "inside.gguf", "gguf", **options)
