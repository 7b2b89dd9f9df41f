"""A tokenizer read back from GGUF metadata encodes like the original."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from byte_level_files import CORPUS, byte_level
from polyquant.errors import InputError
from polyquant.tokenizers import pretokenizers, vocabulary
from polyquant.tokenizers import reading as tokenizer
from polyquant.tokenizers import writing as tokenizer_files
from polyquant.tokenizers.vocabulary import Vocabulary
from sentencepiece_files import chunk, sentencepiece, varint
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "", " ", "  ", "\n", "\n\n \n\t\n   ", "Hello world", " Hello  world ", "HELLO'S I'VE 'Tis he'll it'D",
    "a\u00a0b\u3000c",
    "1 12 123 1234 12345 123456789 ١٢٣ ½", "東京は日本の首都です。", "Київ हिन्दी ไทย عربى",
    "e\u0301 é \u200d zero\u200bwidth \ufeff",
    "🙂🚀👨‍👩‍👧", "!!!???...---===___***", "don't\r\ncan't\rwon't", "def f(x):\n    return x ** 2\n\n\n",
    "<|begin_of_text|>Hi<|end_of_text|>",
    "x<s>y</s>z", "\x00\x01\x7f", "ﷺ﷽", "aaaaaaaaaaaaaaaaaaaaaaaaaa", "▁ under ▁▁ score", "tab\tin\tside",
]  # fmt: skip


def write(folder: Path, body: Any, settings: dict[str, Any] | None = None, **more: bytes) -> dict[str, Path]:
    text = body.to_str() if isinstance(body, Tokenizer) else json.dumps(body)
    data = {"tokenizer.json": text.encode(), "tokenizer_config.json": json.dumps(settings or {}).encode()}
    data |= {k.replace("__", "."): v for k, v in more.items()}
    for name, content in data.items():
        (folder / name).write_bytes(content)
    return {name: folder / name for name in data}


def there_and_back(found: Vocabulary) -> tuple[Tokenizer, dict[str, Any], list[str]]:
    metadata = {k: v.value for k, v in found.metadata().items()}
    files, warnings = tokenizer_files.files(vocabulary.from_metadata(metadata))
    return Tokenizer.from_str(files["tokenizer.json"].decode()), json.loads(files["tokenizer_config.json"]), warnings


def same(a: Tokenizer, b: Tokenizer, texts: list[str] = TEXTS) -> None:
    for text in texts:
        assert a.encode(text).ids == b.encode(text).ids, text
        ids = a.encode(text, add_special_tokens=False).ids
        assert a.decode(ids, skip_special_tokens=False) == b.decode(ids, skip_special_tokens=False), text


def pre_of(kind: pretokenizers.PreTokenizer) -> Any:
    """The pre-tokenizer object that a kind's JSON describes."""
    shell = json.loads(Tokenizer(models.BPE()).to_str()) | {"pre_tokenizer": pretokenizers.to_json(kind)}
    return Tokenizer.from_str(json.dumps(shell)).pre_tokenizer


@pytest.mark.parametrize("kind", [k for k in pretokenizers.KINDS if not k.raw], ids=lambda k: k.names[0])
def test_every_pre_tokenizer_round_trips(kind, tmp_path):
    made = byte_level(pre_of(kind), ignore_merges=kind.ignore_merges)
    if kind.nfc:
        made.normalizer = normalizers.NFC()
    found = tokenizer.from_files(write(tmp_path, made, {"bos_token": "<|begin_of_text|>"}), {})
    assert (found.pre, found.warnings) == (kind.names[0], ())
    again, _, warnings = there_and_back(found)
    same(made, again)
    assert warnings == []
    assert all(pretokenizers.kind_of(name) is kind for name in kind.names)


def test_bos_of_the_post_processor(tmp_path):
    made = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    made.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A <|end_of_text|>",
        pair="<|begin_of_text|> $A <|end_of_text|> $B",
        special_tokens=[("<|begin_of_text|>", 0), ("<|end_of_text|>", 1)],
    )
    settings = {"bos_token": {"content": "<|begin_of_text|>"}, "eos_token": "<|end_of_text|>"}
    found = tokenizer.from_files(write(tmp_path, made, settings), {"pad_token_id": 1, "unk_token_id": 10**6})
    assert found.adds == {"bos": True, "eos": True, "sep": False}
    assert found.special == {"bos": 0, "eos": 1, "pad": 1}
    again, config, _ = there_and_back(found)
    same(made, again)
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        True,
    )
    assert tokenizer.from_files(write(tmp_path, made, {**settings, "add_bos_token": False}), {}).adds["bos"] is False
    odd = tokenizer.from_files(write(tmp_path, made, {"bos_token": "<|end_of_text|>"}), {})
    assert (odd.adds["bos"], "post-processor" in odd.warnings[0]) == (False, True)


def test_a_name_that_implies_bos_gets_add_bos_false(tmp_path):
    made = byte_level(pre_of(pretokenizers.kind_of("llama-bpe")), ignore_merges=True)
    found = tokenizer.from_files(write(tmp_path, made, {"bos_token": "<|begin_of_text|>"}), {})
    assert found.metadata()["tokenizer.ggml.add_bos_token"].value is False
    same(made, there_and_back(found)[0])


def test_added_tokens_gaps_and_extra_rows(tmp_path):
    body = json.loads(byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)).to_str())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    n = len(body["model"]["vocab"])
    body["added_tokens"] += [
        {"id": n, "content": "<tool>", "special": False, **flags},
        {"id": n + 1, "content": "<|im_end|>", "special": False, **flags},
    ]
    found = tokenizer.from_files(write(tmp_path, body), {}, rows=n + 10)
    assert (len(found.tokens), found.types[n : n + 3]) == (n + 10, [4, 3, 5])
    assert found.tokens[n + 2] == f"[PAD{n + 2}]"
    again, _, _ = there_and_back(found)
    original = Tokenizer.from_str(json.dumps(body))
    same(original, again, [*TEXTS, "a <tool>b<|im_end|>"])
    assert again.get_vocab_size() == original.get_vocab_size()
    short = tokenizer.from_files(write(tmp_path, body), {}, rows=n)
    assert (len(short.tokens), "2 tokens" in short.warnings[0]) == (n, True)


def test_merges_as_strings_and_pairs(tmp_path):
    body = json.loads(byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)).to_str())
    pairs = [m.split(" ") if isinstance(m, str) else m for m in body["model"]["merges"]]
    spellings = []
    for merges in (pairs, [" ".join(p) for p in pairs]):
        body["model"]["merges"] = merges
        spellings.append(tokenizer.from_files(write(tmp_path, body), {}).merges)
    assert spellings[0] == spellings[1]
    assert all(" " in m for m in spellings[0])


# ---------------------------------------------------------------- pieces with scores


def pieces(prefix: bool) -> Tokenizer:
    """A tokenizer like Llama 2's: spaces as ▁, byte fallback, all merges of the vocabulary, best piece first."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([t for t in CORPUS for _ in (0, 1)], trainers.BpeTrainer(vocab_size=400))
    body = json.loads(trained.to_str())
    learnt = sorted(body["model"]["vocab"], key=body["model"]["vocab"].get)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *learnt]
    ids = {t: i for i, t in enumerate(tokens)}
    merges = []
    for piece in sorted(learnt, key=ids.get):
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        merges += sorted(((a, b) for a, b in cuts if a in ids and b in ids), key=lambda p: (ids[p[0]], ids[p[1]]))
    made = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if prefix else [replace])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    special = [("<s>", 1)]
    made.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=special)
    return made


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_round_trip(prefix, tmp_path):
    made = pieces(prefix)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    found = tokenizer.from_files(write(tmp_path, made, settings), {})
    assert (found.model, found.pre, found.space_prefix, found.warnings) == ("llama", "default", prefix, ())
    assert found.types[:5] == [2, 3, 3, 6, 6]
    assert found.special == {"bos": 1, "eos": 2, "unk": 0}
    assert found.merges == ()
    again, _, warnings = there_and_back(found)
    same(made, again)
    assert warnings == []


def test_a_missing_merge_is_reported(tmp_path):
    body = json.loads(pieces(True).to_str())
    body["model"]["merges"] = body["model"]["merges"][::2]
    assert "are missing: llama.cpp merges by score only" in tokenizer.from_files(write(tmp_path, body), {}).warnings[0]


def entries_of(made: Tokenizer) -> list[tuple[str, float, int]]:
    tokens = sorted(made.get_vocab(), key=made.get_vocab().get)
    kinds = [2, 3, 3] + [6] * 256
    return [(t, -float(max(0, i - 259)), kinds[i] if i < 259 else 1) for i, t in enumerate(tokens)]


def test_sentencepiece_model_gives_the_scores(tmp_path):
    made = pieces(True)
    entries = entries_of(made)
    both = write(tmp_path, made, {"bos_token": "<s>"}, tokenizer__model=sentencepiece(entries))
    assert [s for s, e in zip(tokenizer.from_files(both, {}).scores, entries, strict=True) if e[2] == 1] == [
        e[1] for e in entries if e[2] == 1
    ]
    stale = [*entries[:-1], ("other", *entries[-1][1:])]
    both = write(tmp_path, made, {"bos_token": "<s>"}, tokenizer__model=sentencepiece(stale))
    assert tokenizer.from_files(both, {}).tokens[-1] == entries[-1][0]


def test_sentencepiece_model_alone(tmp_path):
    made = pieces(True)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
                "added_tokens_decoder": {"1": {"content": "<s>", "special": True},
                    "700": {"content": "<tool>"}}}  # fmt: skip
    files = write(tmp_path, made, settings, tokenizer__model=sentencepiece(entries_of(made)))
    del files["tokenizer.json"]
    found = tokenizer.from_files(files, {}, rows=704)
    assert (found.types[0], found.types[1], found.types[700], found.types[703]) == (2, 3, 4, 5)
    again, _, _ = there_and_back(found)
    same(made, again)
    words = write(tmp_path, made, {}, tokenizer__model=sentencepiece(entries_of(made), model_type=3))
    del words["tokenizer.json"]
    assert "neither BPE nor unigram" in tokenizer.from_files(words, {}).warnings[0]


# ---------------------------------------------------------------- templates, bad input


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("{{ x }}", {"tokenizer.chat_template": "{{ x }}"}),
        (
            [{"name": "default", "template": "D"}, {"name": "tool use", "template": "T"}],
            {
                "tokenizer.chat_template": "D",
                "tokenizer.chat_template.tool_use": "T",
                "tokenizer.chat_templates": ["tool_use"],
            },
        ),
        (None, {"tokenizer.chat_template": "from jinja"}),
        (7, {}),
    ],
)
def test_chat_templates(said, expected, tmp_path):
    made = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    settings = {} if said is None else {"chat_template": said}
    found = tokenizer.from_files(write(tmp_path, made, settings, chat_template__jinja=b"from jinja"), {})
    assert {k: v.value for k, v in found.metadata().items() if "chat" in k} == expected
    _, config, _ = there_and_back(found)
    back = config.get("chat_template")
    assert back == (said if isinstance(said, str) else "from jinja" if said is None else back)
    if isinstance(said, list):
        assert {e["name"]: e["template"] for e in back} == {"default": "D", "tool_use": "T"}


@pytest.mark.parametrize(
    "body",
    [
        {"model": 3},
        {"model": {"type": "BPE", "vocab": []}},
        {"model": {"type": "BPE", "vocab": {"a": "x"}}, "decoder": {"type": "ByteLevel"}},
        {"model": {"type": "BPE", "vocab": {"a": -1}}, "decoder": {"type": "ByteLevel"}},
        {"model": {"type": "BPE", "vocab": {"a": 10**12}}, "decoder": {"type": "ByteLevel"}},
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}}, "decoder": {"type": "ByteLevel"}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["ab"]}, "decoder": {"type": "ByteLevel"}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", 1]]}, "decoder": {"type": "ByteLevel"}},
        {"model": {"type": "BPE", "vocab": {}}, "added_tokens": [{"id": True, "content": "x"}]},
        {"model": {"type": "Unigram", "vocab": {}}},
        {"model": {"type": "Unigram", "vocab": [["a"]]}},
        {"model": {"type": "Unigram", "vocab": [["a", "b"]]}},
        {"model": {"type": "Unigram", "vocab": [["a", 0]], "unk_id": "a"}},
        {
            "model": {"type": "Unigram", "vocab": [["a", 0]]},
            "normalizer": {"type": "Precompiled", "precompiled_charsmap": 1},
        },
        {
            "model": {"type": "Unigram", "vocab": [["a", 0]]},
            "normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"},
        },
        {"model": {"type": "WordPiece", "vocab": {"a": "b"}}},
        [],
    ],
)
def test_broken_tokenizer_json(body, tmp_path):
    with pytest.raises(InputError) as e:
        tokenizer.from_files(write(tmp_path, body), {})
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("kind", ["WordLevel", None])
def test_other_tokenizers_are_reported(kind, tmp_path):
    found = tokenizer.from_files(write(tmp_path, {"model": {"type": kind, "vocab": {}}}), {})
    assert (found.metadata(), len(found.warnings)) == ({}, 1)
    assert tokenizer.from_files({}, {}).warnings


@pytest.mark.parametrize("data", [b"", b"\xff" * 20, b"\x0a", b"\x0a\x7f", b"\x0b", chunk(1, b"\x0a\x02\xff\xfe"),
                                  chunk(1, varint(2 << 3 | 5) + struct.pack("<f", float("nan"))),
                                  chunk(1, varint(3 << 3) + varint(99))])  # fmt: skip
def test_broken_sentencepiece(data, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(InputError):
        tokenizer.from_files({"tokenizer.model": tmp_path / "tokenizer.model"}, {})


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": "abc"},
        {"tokens": ["a", b"b", "ab"]},
        {"merges": [["a", "b"]]},
        {"token_type": [1]},
        {"model": "llama"},
        {"model": "llama", "scores": [0.0]},
        {"model": "llama", "scores": [0.0, float("nan"), 1.0]},
        {"bos_token_id": "0"},
        {"add_bos_token": 1},
        {"model": 7},
        {"model": "t5"},
        {"model": "t5", "scores": [0.0] * 3, "precompiled_charsmap": [9, 0, 0, 0, 1]},
        {"model": "t5", "scores": [0.0] * 3, "precompiled_charsmap": []},
        {"model": "t5", "scores": [0.0] * 3, "precompiled_charsmap": "abc"},
        {"model": "bert", "normalizer.lowercase": 1},
    ],
)
def test_broken_metadata(wrong):
    good = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "token_type": [1, 1, 1], "merges": ["a b"]}
    with pytest.raises(InputError):
        vocabulary.from_metadata({f"tokenizer.ggml.{k}": v for k, v in (good | wrong).items()})


def test_metadata_that_contradicts_itself():
    """Merges of unknown pieces, ids beyond the end, repeated tokens: the written file still loads."""
    metadata = {
        "model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab", "a"], "merges": ["a b", "b c", "nothing", ""],
        "bos_token_id": 9,
    }  # fmt: skip
    found = vocabulary.from_metadata({f"tokenizer.ggml.{k}": v for k, v in metadata.items()})
    files, warnings = tokenizer_files.files(found)
    assert Tokenizer.from_str(files["tokenizer.json"].decode()).encode("ab").ids == [2]
    assert len(warnings) == 2
    assert "bos" not in found.special


def test_chatglm_appends_its_special_tokens_to_the_pieces(tmp_path):
    made = pieces(True)
    entries = entries_of(made)
    files = {"tokenizer.model": tmp_path / "tokenizer.model"}
    files["tokenizer.model"].write_bytes(sentencepiece(entries))
    found = tokenizer.from_files(files, {"model_type": "chatglm", "eos_token_id": 2}, rows=len(entries) + 9)
    n = len(entries)
    assert found.tokens[n : n + 6] == ["[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", f"[PAD{n + 5}]"]
    assert found.prefix == (n + 1, n + 3) and found.special["eos"] == 2
    core = Tokenizer.from_str(tokenizer_files.files(found)[0]["tokenizer.json"].decode())
    plain = made.encode("a sophomore", add_special_tokens=False).ids
    assert core.encode("a sophomore").ids == [n + 1, n + 3, *plain]
    assert core.encode("a sophomore", add_special_tokens=False).ids == plain
    assert core.decode([n + 1, *plain]) == core.decode(plain)
    in_gguf, _, _ = there_and_back(found)
    assert in_gguf.encode("a sophomore").ids == plain  # which has no token for the prefix
