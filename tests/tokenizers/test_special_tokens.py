"""Special tokens of a folder, those added around a prompt, and those that llama.cpp's converter adds for a family."""

from __future__ import annotations

import json
from typing import Any

import pytest

from byte_level_files import byte_level
from polyquant.tokenizers import families, special_tokens
from polyquant.tokenizers import reading as tokenizer
from tokenizers import pre_tokenizers


def template(single: str, pair: str = "") -> dict[str, Any]:
    def items(text: str) -> list[dict[str, Any]]:
        return [{"Sequence": {"id": w[1]}} if w[0] == "$" else {"SpecialToken": {"id": w}} for w in text.split()]

    return {"type": "TemplateProcessing", "single": items(single), "pair": items(pair)}


BOTH = {"bos_token": "<s>", "eos_token": "</s>"}
ROBERTA = {"type": "RobertaProcessing", "cls": ["<s>", 0], "sep": ["</s>", 2]}


@pytest.mark.parametrize(
    ("processor", "settings", "texts", "adds", "said"),
    [
        (None, BOTH, {"bos": "<s>", "eos": "</s>"}, {}, ""),
        (template("<s> $A", "<s> $A <s> $B"), BOTH, {}, {"bos": True, "sep": False}, ""),
        (template("<s> $A </s>"), BOTH, {}, {"bos": True, "eos": True}, ""),
        (template("<s> $A"), {}, {"bos": "<s>"}, {"bos": True}, ""),
        (template("<a> $A"), BOTH, {"bos": "<s>"}, {"bos": False}, "not the bos token"),
        (template("<a> <b> $A"), {}, {"bos": "<a>"}, {"bos": True}, "starts with"),
        (template("$A <end>"), BOTH, {"eos": "<end>", "eot": "</s>"}, {"eos": True}, ""),
        (template("$A <end>"), {**BOTH, "eot_token": "<t>"}, {"eos": "<end>", "eot": "<t>", "eom": "</s>"},
            {"eos": True}, ""),
        (template("[C] $A [S]", "[C] $A [S] $B [S]"), {"cls_token": "[C]", "sep_token": "[S]"},
            {"bos": "[C]", "eos": "[S]"},
         {"bos": True, "eos": True, "sep": False}, ""),
        (template("$A", "$A </s> $B"), BOTH, {"sep": "</s>"}, {"sep": True}, ""),
        (template("<s> $A </s>", "<s> $A </s> </s> $B </s>"), BOTH, {}, {"bos": True, "eos": True, "sep": True}, ""),
        (ROBERTA, BOTH, {"cls": "<s>", "sep": "</s>"}, {"bos": True, "eos": True, "sep": True}, ""),
        (ROBERTA, {**BOTH, "add_eos_token": False}, {}, {"bos": True, "eos": False, "sep": True}, ""),
        ({"type": "Sequence", "processors": [{"type": "ByteLevel"}, template("<s> $A")]}, BOTH, {}, {"bos": True}, ""),
        ({"type": "TemplateProcessing", "single": 3, "pair": [1]}, BOTH, {}, {}, ""),
    ],
)  # fmt: skip
def test_tokens_around_a_prompt(processor, settings, texts, adds, said):
    found = special_tokens.read({"post_processor": processor, "model": {}}, settings)
    assert dict(found.adds) == adds
    assert texts.items() <= found.texts.items()
    assert all(said in w for w in found.warnings) and bool(found.warnings) == bool(said)


def special(path, config: dict[str, Any], **generation: Any) -> tuple[dict[str, int], dict[str, bool]]:
    made = byte_level(
        pre_tokenizers.ByteLevel(add_prefix_space=False), specials=("<|endoftext|>", "<|user|>", "[gMASK]")
    )
    (path / "tokenizer.json").write_text(made.to_str())
    (path / "generation_config.json").write_text(json.dumps(generation))
    files = {name: path / name for name in ("tokenizer.json", "generation_config.json")}
    found = tokenizer.from_files(files, config)
    return dict(found.special), dict(found.adds)


@pytest.mark.parametrize(
    ("config", "ids", "adds"),
    [
        ({}, {}, {}),
        ({"text_config": {"eos_token_id": 2, "bos_token_id": True}}, {"eos": 2}, {}),
        ({"model_type": "glm4"}, {"eos": 0, "eot": 1, "unk": 0, "bos": 0}, {}),
        ({"model_type": "glm4", "eos_token_id": 2}, {"eos": 2, "eot": 1, "unk": 0, "bos": 0}, {}),
        ({"model_type": "glm4_moe"}, {"bos": 2, "eot": 1, "unk": 0}, {}),
        ({"model_type": "chatglm"}, {"eos": 0, "eot": 1, "unk": 0}, {"bos": False}),
        ({"model_type": "nemotron", "pad_token_id": 7}, {"pad": 0, "unk": 1}, {}),
        ({"model_type": "llama", "vocab_size": 49152}, {}, {"bos": False}),
        ({"model_type": "phi"}, {}, {"bos": False}),
        ({"model_type": "modernbert"}, {}, {"bos": True, "eos": True, "sep": True}),
        ({"model_type": "nemotron_h"}, {}, {"bos": True}),
        ({"model_type": "nemotron_h", "num_experts_per_tok": 2}, {}, {}),
        ({"model_type": "hunyuan_v1_dense", "eod_token_id": 5, "eos_token_id": 6}, {"eos": 5, "eot": 9}, {}),
    ],
)  # fmt: skip
def test_additions_of_a_family(config, ids, adds, tmp_path):
    assert special(tmp_path, config, eos_token_id=[9, 5]) == (ids, adds)


def test_unconditional_model_types_are_unique():
    plain = [kind for row in families.FAMILIES if row.vocab is None and not row.lacks for kind in row.model_types]
    assert len(plain) == len(set(plain))
