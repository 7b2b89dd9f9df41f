"""`tokenizer.*` of 43 architectures, key by key as llama.cpp's converter writes it.

Data: tests/vectors/tokenizers/README.md.
"""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from golden import VECTORS
from polyquant.tokenizers import reading as tokenizer
from polyquant.tokenizers import vocabulary
from polyquant.tokenizers import writing as tokenizer_files
from sentencepiece_files import sentencepiece
from tokenizers import Tokenizer

NAMES = [
    "apertus",
    "bert",
    "bloom",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5_moe",
    "falcon",
    "falcon_h1",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "granite",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "llama3",
    "llama4",
    "mamba2",
    "minimax_m2",
    "mixtral",
    "modernbert",
    "nemotron",
    "nemotron_h",
    "olmo2",
    "olmoe",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
    "smollm3",
    "stablelm",
    "starcoder2",
]
# These folders disable the leading space; the converter omits add_space_prefix, so llama.cpp adds one.
SPACE_LEFT_OUT = {"ernie4_5_moe", "mixtral", "nemotron", "phi3"}
TEXTS = [
    "", " ", "Hello world", "  two  spaces ", "don't DON'T we'll", "1 12 123 1234567",
    "naïve Größe Київ 東京 한국어 हिन्दी 🙂👨\u200d👩\u200d👧", "a\n\nb\r\n\tc",
    "x<s>y</s>z <|endoftext|> [SEP] [MASK]", "▁ __ !!! ... ---", "\x00\x7f\ufffd", "e\u0301 é ﬁ ½",
]  # fmt: skip


@cache
def golden() -> dict[str, Any]:
    return json.loads(lzma.decompress((VECTORS / "tokenizers/metadata.json.xz").read_bytes()))


def read(name: str, path: Path) -> vocabulary.Vocabulary:
    case = golden()[name]
    data = {file: text.encode() for file, text in case["files"].items()}
    if "pieces" in case:
        data["tokenizer.model"] = sentencepiece([tuple(p) for p in case["pieces"]], prefix=case["add_prefix"])
    for file, content in data.items():
        (path / file).write_bytes(content)
    return tokenizer.from_files({file: path / file for file in data}, case["config"], rows=case["rows"])


def test_every_architecture_is_covered():
    assert sorted(golden()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_metadata_equals_the_converter(name, tmp_path):
    case = golden()[name]
    found = read(name, tmp_path).metadata()
    assert ("tokenizer.ggml.pre" in found) == case["pre_written"]
    found.pop("tokenizer.ggml.pre", None)
    plain = {k: (m.kind.name, m.item and m.item.name) for k, m in found.items()}
    assert plain == {k: (kind, item) for k, (kind, item, _) in case["metadata"].items()}
    for key, (_, _, value) in case["metadata"].items():
        ours = found[key].value
        assert (ours if isinstance(value, str | bool | int) else list(ours)) == value, key


@pytest.mark.parametrize("name", NAMES)
def test_gguf_tokenizer_gives_the_ids_of_the_folder(name, tmp_path):
    found = read(name, tmp_path)
    words = vocabulary.from_metadata({k: m.value for k, m in found.metadata().items()})
    again = Tokenizer.from_str(tokenizer_files.files(words)[0]["tokenizer.json"].decode())
    original = Tokenizer.from_str(golden()[name]["files"]["tokenizer.json"])
    left_out = any("add_space_prefix is omitted" in w for w in found.warnings)
    assert left_out == (name in SPACE_LEFT_OUT)
    if left_out:
        assert words.space_prefix is True
        return
    for text in TEXTS:
        expected = original.encode(text, add_special_tokens=False).ids
        assert again.encode(text, add_special_tokens=False).ids == expected, text
        assert again.decode(expected, skip_special_tokens=False) == original.decode(expected, skip_special_tokens=False)
