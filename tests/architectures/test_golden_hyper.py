"""config.json and GGUF give the same hyper-parameters: widths, experts, windows, scaled RoPE, latent attention."""

from __future__ import annotations

from dataclasses import replace

import pytest

from architectures.golden_models import Golden
from polyquant.architectures.deepseek import DEEPSEEK_V3
from polyquant.architectures.find import of_config, of_metadata
from polyquant.architectures.gpt_oss import GPT_OSS

NAMES = (
    "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4", "glm4_moe", "gpt_oss", "llama4", "minimax_m2",
    "mixtral", "nemotron", "olmoe",
)  # fmt: skip


def both(name):
    golden = Golden(name)
    metadata = {key: value for key, (_, value) in golden.said["metadata"].items()}
    record = of_config(golden.config)
    assert of_metadata(metadata) is record
    label, tied = metadata["general.architecture"], "output.weight" not in golden.said["tensors"]
    vocab = golden.config["vocab_size"]
    return record.hyper.read_config(golden.config), record.hyper.read_metadata(metadata, label, vocab=vocab, tied=tied)


@pytest.mark.parametrize("name", NAMES)
def test_folder_and_gguf_give_equal_hyperparameters(name):
    of_folder, of_gguf = both(name)
    if of_folder.rope.get("rope_type") == "llama3":  # GGUF stores it as a tensor
        of_folder = replace(of_folder, rope={})
    assert of_gguf == of_folder


@pytest.mark.parametrize(
    ("name", "windows"), [("gpt_oss", (8, 0, 8)), ("cohere2", (8, 8, 8, 0)), ("mixtral", ()), ("llama4", ())]
)
def test_attention_windows(name, windows):
    assert [hyper.windows for hyper in both(name)] == [windows, windows]


def test_yarn_options_missing_in_gguf_are_a_warning():
    hyper, _ = both("deepseek_v3")
    keys, warnings = DEEPSEEK_V3.hyper.to_metadata(hyper)
    assert not warnings and abs(keys["rope.scaling.yarn_log_multiplier"].value - 0.1) < 1e-12
    _, (warning,) = DEEPSEEK_V3.hyper.to_metadata(replace(hyper, rope={**hyper.rope, "mscale": 0.7}))
    assert "mscale" in warning and "\n" not in warning
    hyper, _ = both("gpt_oss")
    assert not GPT_OSS.hyper.to_metadata(hyper)[1] and hyper.rope["truncate"] is False
    _, (warning,) = GPT_OSS.hyper.to_metadata(replace(hyper, rope={**hyper.rope, "truncate": True}))
    assert "truncate" in warning
