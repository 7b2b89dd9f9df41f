"""Round trips of WordPiece: ids of the Hugging Face tokenizer, and of llama.cpp's algorithm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from byte_level_files import CORPUS
from polyquant.errors import InputError, UnsupportedError
from polyquant.tokenizers import reading as tokenizer
from polyquant.tokenizers import vocabulary
from polyquant.tokenizers import writing as tokenizer_files
from polyquant.tokenizers.tokenizer import open_tokenizer
from polyquant.tokenizers.vocabulary import Vocabulary
from polyquant.types import Checkpoint
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SETTINGS = {
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "mask_token": "[MASK]",
}
TEXTS = [
    "", " ", "Hello world", "NAÏVE façade Größe", "e\u0301 é İstanbul ß ﬁ", "I've been told he's there",
    "東京は日本 Київ हिन्दी עִבְרִית",
    "a\u00a0b\u3000c\td\ne", "x\x00y\x01z\ufffdw\u200dv\u00adu", "(a)[b]{c}!?...---\u2014«»‘’“”…", "1,234.5 $9 €8 ½ ٣",
    "[MASK] is [SEP]arate", "a" * 101, "a" * 100,
    "🙂🚀👨\u200d👩\u200d👧", "##ing ##", "▁x", "^`~|+=<>", "𠀀𪜀㐀豈",
]  # fmt: skip
LETTERS = "aAéÉe\u0301ßtheingspvl ###[]12,.'-\t\u00a0東🙂ЙЇ\u200d\u00ad"


def trained(**options: Any) -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(**options)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL))
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def folder(path: Path, made: Tokenizer | dict[str, Any], **more: str) -> dict[str, Path]:
    body = made.to_str() if isinstance(made, Tokenizer) else json.dumps(made)
    data = {"tokenizer.json": body, "tokenizer_config.json": json.dumps(SETTINGS), **more}
    for name, text in data.items():
        (path / name).write_text(text)
    return {name: path / name for name in data}


def back(found: Vocabulary) -> Tokenizer:
    words = vocabulary.from_metadata({k: m.value for k, m in found.metadata().items()})
    files, warnings = tokenizer_files.files(words)
    assert warnings == []
    return Tokenizer.from_str(files["tokenizer.json"].decode())


OPTIONS = [
    {"lowercase": True},
    {"lowercase": False},
    {"lowercase": True, "strip_accents": False},
    {"lowercase": False, "strip_accents": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ids_round_trip(options, tmp_path):
    made = trained(**options)
    found = tokenizer.from_files(folder(tmp_path, made), {"type_vocab_size": 2})
    assert (found.model, found.segments, found.warnings) == ("bert", 2, ())
    assert (found.lowercase, found.strip_accents) == (options["lowercase"], options.get("strip_accents"))
    assert found.adds == {"bos": True, "eos": True, "sep": False}
    assert found.special == {"bos": 2, "eos": 3, "unk": 1, "sep": 3, "pad": 0, "cls": 2, "mask": 4}
    again = back(found)
    assert again.get_vocab() == made.get_vocab()
    for text in TEXTS:
        assert again.encode(text).ids == made.encode(text).ids, text
        assert again.encode(text, "pair").type_ids == made.encode(text, "pair").type_ids
        ids = made.encode(text).ids
        assert again.decode(ids) == made.decode(ids)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    made = trained(lowercase=True)
    found = tokenizer.from_files(folder(tmp_path_factory.mktemp("bert"), made), {})
    return made, found, back(found)


@settings(deadline=None, max_examples=200)
@given(st.one_of(st.text(max_size=30), st.text(alphabet=LETTERS, max_size=30)))
def test_any_text(both, text):
    made, _, again = both
    assert again.encode(text).ids == made.encode(text).ids


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet="thegisanp ", max_size=30))
def test_longest_pieces_first_like_llama_cpp(both, text):
    made, found, _ = both
    ids = {token: i for i, token in enumerate(found.tokens)}
    expected: list[int] = []
    for word in text.split():
        rest, pieces = "▁" + word, []
        while rest:
            size = next((n for n in range(len(rest), 0, -1) if rest[:n] in ids), None)
            if size is None:
                pieces = [ids["[UNK]"]]
                break
            pieces.append(ids[rest[:size]])
            rest = rest[size:]
        expected += pieces
    assert made.encode(text, add_special_tokens=False).ids == expected


def test_a_vocab_txt_alone(tmp_path):
    made = trained(lowercase=True)
    vocab = made.get_vocab()
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(vocab, key=vocab.__getitem__)) + "\n")
    alone = {"vocab.txt": tmp_path / "vocab.txt"}
    (tmp_path / "json").mkdir()
    whole = tokenizer.from_files(folder(tmp_path / "json", made), {})
    found = tokenizer.from_files(alone, {})
    assert found.metadata() == whole.metadata()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False, "strip_accents": True}))
    cased = tokenizer.from_files({**alone, "tokenizer_config.json": tmp_path / "tokenizer_config.json"}, {}, rows=310)
    assert (cased.lowercase, cased.strip_accents, cased.tokens[309]) == (False, True, "▁[PAD309]")
    assert back(cased).get_vocab_size() == len(vocab)
    (tmp_path / "vocab.txt").write_bytes(b"\xff")
    with pytest.raises(InputError, match="UTF-8"):
        tokenizer.from_files(alone, {})


def test_a_checkpoint_runs_from_its_vocab_txt_and_from_gguf(tmp_path, both):
    made, found, _ = both
    vocab = made.get_vocab()
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(vocab, key=vocab.__getitem__)))
    beside = Checkpoint("hf", tmp_path, {}, files={"vocab.txt": tmp_path / "vocab.txt"})
    metadata = {k: m.value for k, m in found.metadata().items()}
    for checkpoint in (beside, Checkpoint("gguf", Path("x.gguf"), {}, metadata=metadata, naming="gguf")):
        opened = open_tokenizer(checkpoint)
        assert opened.encode("Hello, Größe") == made.encode("Hello, Größe").ids
        assert opened.encode("he", add_special=False) == made.encode("he", add_special_tokens=False).ids
    old = metadata | {"tokenizer.ggml.cls_token_id": 2}  # the id had a different name
    del old["tokenizer.ggml.bos_token_id"]
    assert vocabulary.from_metadata(old).around() == ((2,), (3,))


def test_differences_from_llama_cpp_are_reported(tmp_path):
    made = trained(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit()])
    with pytest.raises(UnsupportedError, match="as BERT does"):
        tokenizer.from_files(folder(tmp_path, made), {})
    assert tokenizer.from_files(folder(tmp_path, made), {}, pre="bert-bge").pre == "bert-bge"
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer()])
    made.normalizer = normalizers.BertNormalizer(handle_chinese_chars=False)
    assert "handle_chinese_chars" in tokenizer.from_files(folder(tmp_path, made), {}).warnings[0]
    made.normalizer = normalizers.Lowercase()
    plain = tokenizer.from_files(folder(tmp_path, made), {})
    assert (plain.lowercase, plain.strip_accents) == (True, False)
    body = json.loads(made.to_str()) | {"normalizer": None}
    none = tokenizer.from_files(folder(tmp_path, body), {})
    assert (none.lowercase, none.strip_accents) == (False, False)
