"""tekken.json, and vocab.json with merges.txt: read as the equivalent tokenizer.json."""

from __future__ import annotations

import itertools
import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_level_files import byte_level
from polyquant.errors import InputError, UnsupportedError
from polyquant.tokenizers import engine
from polyquant.tokenizers import reading as tokenizer
from polyquant.tokenizers.pretokenizers import kind_of, to_json
from polyquant.tokenizers.tokenizer import Tokenizer, open_tokenizer
from polyquant.types import Checkpoint
from tokenizers import pre_tokenizers

PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = [b"th", b"he", b"the", b" the", b"in", b"ing", b"\xe4\xba", "京".encode(), b"  ", b"    ", b"unreachable"]
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]"]


def tekken(**changes: Any) -> dict[str, Any]:
    tokens = [bytes([b]) for b in range(256)] + WORDS
    vocab = [{"rank": i, "token_bytes": b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)]
    special = [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(SPECIAL)]
    config = {"pattern": PATTERN, "default_num_special_tokens": 10, "default_vocab_size": 10 + len(tokens)}
    return {"config": config, "vocab": vocab, "special_tokens": special, **changes}


def write(path: Path, **files: Any) -> dict[str, Path]:
    for name, body in files.items():
        file = path / name.replace("__", ".")
        file.write_text(body if isinstance(body, str) else json.dumps(body))
    return {p.name: p for p in path.iterdir()}


def opened(path: Path) -> Tokenizer:
    return open_tokenizer(Checkpoint("hf", path, {}, files={p.name: p for p in path.iterdir()}))


def test_tekken(tmp_path):
    found = tokenizer.from_files(write(tmp_path, tekken__json=tekken()), {"model_type": "mistral"}, rows=280)
    assert (found.model, found.pre, found.warnings) == ("gpt2", "tekken", ())
    assert found.tokens[:5] == [*SPECIAL, "<SPECIAL_4>"] and found.types[:11] == [3] * 10 + [1]
    assert found.tokens[10 + 32] == "Ġ" and found.tokens[10 + 256 + 3] == "Ġthe" and found.tokens[-1] == "[PAD279]"
    assert found.special == {"bos": 1, "eos": 2, "unk": 0} and found.adds == {"bos": True, "eos": False}
    assert {"t h", "h e", "t he", "th e", "Ġ the"} <= set(found.merges)
    assert found.merges.index("t h") < found.merges.index("h e") < found.merges.index("th e")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("tekken")
    write(path, tekken__json=tekken())
    return opened(path)


@settings(deadline=None, max_examples=150)
@given(st.text(alphabet="theing  京T\n1'", max_size=25))
def test_the_lowest_rank_is_merged_first_like_tiktoken(run, text):
    ranks = {bytes([b]): b for b in range(256)} | {w: 256 + i for i, w in enumerate(WORDS)}
    expected = [1]
    for piece, _ in engine.stage("pre_tokenizer", to_json(kind_of("tekken"))["pretokenizers"][0]).pre_tokenize_str(
        text
    ):
        word = piece.encode()
        parts = [word] if word in ranks else [bytes([b]) for b in word]
        while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]:
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        expected += [10 + ranks[p] for p in parts]
    assert run.encode(text) == expected
    assert run.decode(expected) == text


@pytest.mark.parametrize(
    "wrong",
    [
        {"config": 3},
        {"config": {"pattern": PATTERN, "default_num_special_tokens": 10, "default_vocab_size": 10**12}},
        {"config": {"pattern": PATTERN, "default_num_special_tokens": 10, "default_vocab_size": 9}},
        {"vocab": [{"rank": 0, "token_bytes": "?"}]},
        {"vocab": [{"rank": 0, "token_bytes": ""}]},
        {"vocab": [{"rank": 1, "token_bytes": "YQ=="}]},
        {"vocab": [{"rank": 0, "token_bytes": "YQ=="}, {"rank": 1, "token_bytes": "YQ=="}]},
        {"vocab": [7]},
        {"special_tokens": [{"rank": 0}]},
    ],
)
def test_a_broken_tekken(wrong, tmp_path):
    with pytest.raises(InputError) as caught:
        tokenizer.from_files(write(tmp_path, tekken__json=tekken(**wrong)), {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "pre"), [("GPT2Tokenizer", "gpt-2"), ("Qwen2TokenizerFast", "qwen2")])
def test_vocab_and_merges(name, pre, tmp_path):
    made = byte_level(engine.stage("pre_tokenizer", to_json(kind_of(pre))))
    body = json.loads(made.to_str())["model"]
    merges = ["#version: 0.2", *(m if isinstance(m, str) else " ".join(m) for m in body["merges"]), ""]
    said = {"tokenizer_class": name, "eos_token": "<|end_of_text|>",
            "added_tokens_decoder": {"0": {"content": "<|begin_of_text|>", "special": True}}}  # fmt: skip
    files = write(tmp_path, vocab__json=body["vocab"], merges__txt="\r\n".join(merges), tokenizer_config__json=said,
                  added_tokens__json={"<tool>": len(body["vocab"])})  # fmt: skip
    found = tokenizer.from_files(files, {})
    assert (found.pre, found.special, found.types[:2], found.types[-1]) == (pre, {"eos": 1}, [3, 3], 4)
    for text in ("I've 1234 things\n\n東京", "a <tool> b"):
        assert opened(tmp_path).decode(opened(tmp_path).encode(text)) == text
    assert opened(tmp_path).encode("I've 1234 things\n\n東京") == made.encode("I've 1234 things\n\n東京").ids
    write(tmp_path, tokenizer_config__json={"tokenizer_class": "OddTokenizer"})
    with pytest.raises(UnsupportedError, match="OddTokenizer"):
        tokenizer.from_files(files, {})


def test_an_end_of_message_does_not_end_a_continued_answer(tmp_path):
    special = ("<|return|>", "<|call|>", "<|end|>")
    made = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), specials=special)
    (tmp_path / "tokenizer.json").write_text(made.to_str())
    assert opened(tmp_path).ends == {0, 1}
    plain = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), specials=special[1:])
    (tmp_path / "tokenizer.json").write_text(plain.to_str())
    assert opened(tmp_path).ends == {0, 1}  # <|call|> and <|end|>
