"""Text to ids and back, as in transformers and llama.cpp, and clear errors where it is not possible."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from golden import VECTORS
from polyquant.analysis.demo import demo_model
from polyquant.errors import InputError, UnsupportedError
from polyquant.opening import open_checkpoint
from polyquant.tokenizers import vocabulary
from polyquant.tokenizers import writing as tokenizer_files
from polyquant.tokenizers.tokenizer import _assembled, open_tokenizer
from polyquant.types import Checkpoint
from sentencepiece_files import sentencepiece as sentencepiece_bytes
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers

TINY = VECTORS / "models/tiny-llama-tied"
IDS = {
    "": [0],
    " hi": [0, 265, 75],
    "And it came to pass": [0, 298, 356, 474, 292, 603],
    "héllo 北京🙂": [0, 74, 130, 105, 278, 81, 223, 164, 237, 248, 163, 121, 108, 175, 256, 250, 227],
    "<|end_of_text|>x": [0, 1, 90],
}
"""Ids of the demo tokenizer, equal in transformers 5.23 (folder) and llama-cpp-python 0.3.36 (converted file)."""
TEXTS = [
    "",
    " ",
    "  two",
    "Hello world",
    "Größe naïve 北京 🙂🚀👨‍👩‍👧",
    "\n\n a\tb",
    "a" * 30,
    "﷽ ½ e\u0301",
    "do n't , you ? 's",
]


@pytest.fixture(scope="module")
def demo():
    return open_tokenizer(open_checkpoint(demo_model("llama")))


@pytest.fixture(scope="module")
def demo_gguf(demo_files):
    return open_tokenizer(open_checkpoint(demo_files("llama", "bf16")))


@pytest.mark.parametrize("text", IDS)
def test_ids_equal_transformers_and_llama_cpp(text, demo, demo_gguf):
    assert demo.encode(text) == demo_gguf.encode(text) == IDS[text]
    assert demo.encode(text, add_special=False) == IDS[text][1:]


def test_control_tokens_in_a_prompt_can_be_plain_text(demo):
    ids = demo.encode("<|end_of_text|>x", parse_special=False, add_special=False)
    assert 1 not in ids and demo.decode(ids) == "<|end_of_text|>x"
    assert demo.encode("<|end_of_text|>x", add_special=False) == [1, 90]  # the switch is off again


def test_special_tokens(demo, demo_gguf):
    for tokenizer in (demo, demo_gguf):
        assert tokenizer.special == {"bos": 0, "eos": 1, "pad": 2}
        assert tokenizer.ends == {1}
        assert tokenizer.text_of("eos") == "<|end_of_text|>" and tokenizer.text_of("unk") is None
        assert tokenizer.size == 2048 and tokenizer.id_of("<|pad|>") == 2 and tokenizer.id_of("no such") is None
        assert tokenizer.decode([0, 74, 1]) == "h" and tokenizer.decode([0, 74, 1], skip_special=False).endswith(
            "h<|end_of_text|>"
        )


# ---------------------------------------------------------------- one token after the other


def folder(path: Path, core: Core | dict | bytes | None, **files: dict) -> Checkpoint:
    """A checkpoint with only tokenizer files."""
    if core is not None:
        raw = (
            core
            if isinstance(core, bytes)
            else (json.dumps(core) if isinstance(core, dict) else core.to_str()).encode()
        )
        (path / "tokenizer.json").write_bytes(raw)
    for name, body in files.items():
        (path / f"{name}.json").write_text(json.dumps(body))
    return Checkpoint("hf", path, {}, files={p.name: p for p in path.iterdir()})


def pieces_with_byte_fallback() -> dict:
    """GGUF metadata of a small SentencePiece model."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        "a",
        "b",
        "H",
        "▁H",
        "▁Ha",
        "n",
        "'",
        "t",
        "o",
        "d",
        "▁do",
    ]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 12]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(12)],
    }


METADATA = pieces_with_byte_fallback()


def sentencepiece() -> Checkpoint:
    return Checkpoint("gguf", Path("x.gguf"), {}, metadata=METADATA, naming="gguf")


def unigram(path: Path) -> Checkpoint:
    characters = sorted(set("".join(TEXTS)) - {" "})
    core = Core(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("▁H", -1.5), *((c, -2.0) for c in characters)], unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return folder(path, core)


def wordpiece(path: Path) -> Checkpoint:
    vocab = {
        w: i
        for i, w in enumerate(["[UNK]", "do", "n", "'", "t", ",", "you", "?", "Hello", "wor", "##ld", "s", "a", "##a"])
    }
    core = Core(models.WordPiece(vocab, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.WordPiece()
    return folder(path, core)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["demo", "sentencepiece", "unigram", "wordpiece"])
def test_streamed_pieces_join_to_the_whole_text(kind, text, demo, tmp_path):
    makers = {
        "sentencepiece": sentencepiece,
        "unigram": lambda: unigram(tmp_path),
        "wordpiece": lambda: wordpiece(tmp_path),
    }
    tokenizer = demo if kind == "demo" else open_tokenizer(makers[kind]())
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    said = [stream.push(i) for i in ids]
    assert not any("\ufffd" in piece for piece in said)
    assert "".join(said) + stream.finish() == tokenizer.decode(ids)
    if kind in ("demo", "sentencepiece"):
        assert tokenizer.decode(ids) == text


def test_a_character_is_emitted_with_its_last_byte(demo):
    ids = demo.encode("🙂", add_special=False)
    stream = demo.stream()
    assert len(ids) > 1 and [stream.push(i) for i in ids] == [""] * (len(ids) - 1) + ["🙂"]


def test_a_partial_character_is_emitted_at_the_end_or_before_the_next(demo):
    first = demo.encode("🙂", add_special=False)[0]
    (letter,) = demo.encode("h", add_special=False)
    stream = demo.stream()
    assert stream.push(first) == "" and stream.finish() == "\ufffd" and stream.finish() == ""
    stream = demo.stream()
    assert [stream.push(i) for i in (first, letter, letter)] == ["", "\ufffdh", "h"]


def test_only_the_first_leading_space_is_dropped():
    tokenizer = open_tokenizer(sentencepiece())
    ha = tokenizer.id_of("▁Ha")
    assert tokenizer.encode("Ha Ha") == [1, ha, ha]
    stream = tokenizer.stream()
    assert [stream.push(i) for i in (1, ha, ha, 2, ha)] == ["", "Ha", " Ha", "", " Ha"]
    stream = tokenizer.stream(skip_special=False)
    assert "".join(stream.push(i) for i in (1, ha)) == tokenizer.decode([1, ha], skip_special=False)


def test_unused_embedding_rows_decode_to_nothing(demo):
    stream = demo.stream()
    assert demo.decode([5000]) == "" and stream.push(5000) == "" and stream.push(74) == "h"


# ---------------------------------------------------------------- settings of the files


def shell(**changes: object) -> dict:
    body = json.loads((TINY / "hf/tokenizer.json").read_text())
    return {**body, **changes}


SETTINGS = {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|end_of_text|>"}}


@pytest.mark.parametrize(
    ("settings", "around"),
    [({}, ([], [])), ({"add_bos_token": True}, ([0], [])), ({"add_eos_token": True}, ([], [1])),
     ({"add_bos_token": True, "add_eos_token": True}, ([0], [1])), ({"add_bos_token": False}, ([], []))],
)  # fmt: skip
def test_special_tokens_around_a_prompt(settings, around, tmp_path):
    tokenizer = open_tokenizer(folder(tmp_path, shell(), tokenizer_config={**SETTINGS, **settings}))
    inner = tokenizer.encode("hi", add_special=False)
    assert tokenizer.encode("hi") == [*around[0], *inner, *around[1]]


def test_the_settings_override_the_post_processor(tmp_path):
    body = json.loads((demo_model("llama") / "tokenizer.json").read_text())
    tokenizer = open_tokenizer(folder(tmp_path, body, tokenizer_config={**SETTINGS, "add_bos_token": False}))
    assert tokenizer.encode(" hi") == IDS[" hi"][1:]


def test_every_end_token_of_the_folder(tmp_path):
    added = shell()["added_tokens"] + [
        {**shell()["added_tokens"][0], "id": 512 + i, "content": text, "special": special}
        for i, (text, special) in enumerate([("<|im_end|>", True), ("<|eot_id|>", False)])
    ]
    found = folder(
        tmp_path, shell(added_tokens=added), tokenizer_config=SETTINGS, generation_config={"eos_token_id": [7, 9]}
    )
    assert open_tokenizer(found).ends == {1, 7, 9, 512}  # <|eot_id|> is not a control token here
    found = folder(tmp_path, shell(), tokenizer_config=SETTINGS, generation_config={"eos_token_id": "x"})
    assert open_tokenizer(found).ends == {1}


def lone_model(path: Path, config: dict, **files: dict) -> Checkpoint:
    """A folder with tokenizer.model alone: the pieces of the metadata above."""
    columns = (METADATA[f"tokenizer.ggml.{k}"] for k in ("tokens", "scores", "token_type"))
    (path / "tokenizer.model").write_bytes(sentencepiece_bytes(list(zip(*columns, strict=True))))
    found = folder(path, None, **files)
    return Checkpoint("hf", path, {}, config=config, files=found.files)


def test_a_sentencepiece_model_alone(tmp_path):
    tokenizer = open_tokenizer(lone_model(tmp_path, {"eos_token_id": 2, "bos_token_id": 1}))
    ids = open_tokenizer(sentencepiece()).encode("Ha é", add_special=False)
    assert tokenizer.encode("Ha é") == [1, *ids] and tokenizer.decode(ids) == "Ha é" and tokenizer.ends == {2}


def test_chatglm_prepends_two_tokens(tmp_path):
    tokenizer = open_tokenizer(lone_model(tmp_path, {"model_type": "chatglm", "eos_token_id": 2}))
    ids = tokenizer.encode("Ha", add_special=False)
    assert tokenizer.encode("Ha") == [272, 274, *ids] and tokenizer.decode([272, 274, *ids]) == "Ha"
    named = {
        "added_tokens_decoder": {
            str(280 + i): {"content": t, "special": True} for i, t in enumerate(["sop", "[gMASK]"])
        }
    }
    tokenizer = open_tokenizer(lone_model(tmp_path, {"model_type": "chatglm"}, tokenizer_config=named))
    assert tokenizer.encode("Ha") == [281, 280, *ids] and tokenizer.decode([281, 280, *ids]) == "Ha"


def test_truncation_and_padding_are_disabled(tmp_path):
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    assert len(open_tokenizer(folder(tmp_path, shell(truncation=cut))).encode("a b c d e f")) > 2


# ---------------------------------------------------------------- refused tokenizers

REFUSED = {
    "nothing": (lambda p: folder(p, None), "neither tokenizer.json nor tokenizer.model"),
    "a GGUF without": (lambda p: Checkpoint("gguf", p, {}, naming="gguf"), "no tokenizer in the file"),
    "rwkv": (lambda p: Checkpoint("gguf", p, {}, {**METADATA, "tokenizer.ggml.model": "rwkv"}, naming="gguf"),
        "tokenizer model 'rwkv'"),
    "unknown cut": (
        lambda p: Checkpoint("gguf", p, {},
            {**METADATA, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "x\x1b[2J"}, naming="gguf"),
        r"pre-tokenizer 'x\x1b[2J' is unknown",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_tokenizer_that_cannot_run(case, tmp_path):
    make, said = REFUSED[case]
    with pytest.raises(UnsupportedError) as caught:
        open_tokenizer(make(tmp_path))
    assert said in str(caught.value) and "token ids" in str(caught.value)


BROKEN = {
    "empty": b"",
    "a list": b"[]",
    "no model": {},
    "unknown model": shell(model={"type": "Nope"}),
    "merge of unknown": shell(model={"type": "BPE", "vocab": {"a": 0}, "merges": ["z q"]}),
    "merge without the prefix": shell(
        model={"type": "BPE", "vocab": {"a": 0, "é": 9}, "merges": [["a", "é"]], "continuing_subword_prefix": "#"}
    ),
    "merge without the escaped prefix": json.dumps(
        shell(model={"vocab": {"a": 0, "é": 9}, "merges": ["a é"], "continuing_subword_prefix": "#"})
    )
    .replace("continuing_s", r"continuing\u005fs")
    .encode(),
    "deep": b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "no UTF-8": b'{"model": "\xff"}',
    "bad expression": shell(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_tokenizer_is_a_one_line_error(case, tmp_path):
    with pytest.raises(InputError) as caught:
        open_tokenizer(folder(tmp_path, BROKEN[case]))
    assert "tokenizer.json" in str(caught.value) and "\n" not in str(caught.value)


def test_merges_of_a_bpe_with_a_prefix(tmp_path):
    merges = {"vocab": {"a": 0, "##b": 1, "ab": 2}, "merges": ["a ##b"], "continuing_subword_prefix": "##"}
    tokenizer = open_tokenizer(folder(tmp_path, shell(model={"type": "BPE", **merges})))
    assert tokenizer.encode("ab") == [2]


def test_a_file_too_large_is_not_read(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as f:
        f.truncate(64_000_001)
    with pytest.raises(InputError, match="too large"):
        open_tokenizer(folder(tmp_path, None))


def test_a_catastrophic_regex_times_out(tmp_path, capfd):
    evil = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = open_tokenizer(folder(tmp_path, shell(pre_tokenizer=evil)))
    with pytest.raises(InputError, match="fails on this input"):
        tokenizer.encode("a" * 40 + "b")


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'polyquant\[run\]'"):
        open_tokenizer(folder(tmp_path, shell()))


@pytest.mark.parametrize("kind", ["byte-level", "pieces"])
def test_an_assembled_tokenizer_equals_the_parsed_json(kind, demo_files):
    metadata = open_checkpoint(demo_files("llama", "bf16")).metadata if kind == "byte-level" else METADATA
    body = tokenizer_files.document(vocabulary.from_metadata(metadata), [])
    parsed = Core.from_str(json.dumps(body))
    assert json.loads(_assembled(body).to_str()) == json.loads(parsed.to_str())
