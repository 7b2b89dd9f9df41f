"""Recognition of llama.cpp's pre-tokenizer for a tokenizer.json: by spelling, by behaviour, by the family's name."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_level_files import byte_level
from polyquant.errors import InputError, UnsupportedError
from polyquant.tokenizers import engine, families, recognition
from polyquant.tokenizers import reading as tokenizer
from polyquant.tokenizers.pretokenizers import KINDS, kind_of, to_json
from tokenizers import pre_tokenizers

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2 = {**BYTES, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)


def cut(regex: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}


def then(*nodes: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(nodes)}


# The stages of the models' own files, their model type, ignore_merges, and the name that llama.cpp's converter gives to
# each.
MODELS = [
    ("gpt2", GPT2, False, "gpt-2"),
    ("llama", then(cut(LLAMA3), BYTES), True, "llama-bpe"),
    ("llama4", then(cut(O200K), BYTES), False, "llama4"),
    ("gpt_oss", then(cut(O200K), BYTES), False, "gpt-4o"),
    ("minimax_m2", then(cut(O200K), BYTES), False, "minimax-m2"),
    ("mistral", then(cut(TEKKEN), BYTES), True, "tekken"),
    ("qwen2", then(cut(QWEN2), BYTES), False, "qwen2"),
    ("qwen3_5_moe",
        then(cut(QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")),
            BYTES), False, "qwen35"),
    ("deepseek_v3",
        then(cut(r"\p{N}{1,3}"), cut("[一-龥\u3040-ゟ゠-ヿ]+"),
            cut(DEEPSEEK3.replace(r"\r", "\r").replace(r"\n", "\n")), BYTES),
     False, "deepseek-v3"),
    ("llama",
        then(cut("[\r\n]"), cut(r"\s?\p{L}+"), cut(r"\s?\p{P}+"), cut("[一-龥ࠀ-一가-\ud7ff]+"), DIGITS, BYTES),
        False, "deepseek-coder"),
    ("glm4", then(cut(LLAMA3), BYTES), False, "glm4"),
    ("olmo2", then(cut(LLAMA3), BYTES), False, "dbrx"),
    ("olmoe", GPT2, False, "olmo"),
    ("granite", then(DIGITS, GPT2), False, "refact"),
    ("granitemoehybrid", then(cut(LLAMA3), BYTES), False, "dbrx"),
    ("starcoder2", then(DIGITS, GPT2), False, "starcoder"),
    ("cohere2", then(DIGITS, GPT2), False, "command-r"),
    ("stablelm", then(cut(QWEN2, "Removed", True), BYTES), False, "stablelm2"),
    ("falcon",
        then({"type": "Punctuation", "behavior": "Contiguous"}, GPT2, {"type": "Digits", "individual_digits": False},
                    cut("[0-9][0-9][0-9]")), False, "falcon"),
    ("falcon_h1", then(cut(LLAMA3), BYTES), True, "falcon-h1"),
    ("lfm2", then(cut(LLAMA3), BYTES), True, "lfm2"),
    ("gpt_neox", GPT2, False, "mpt"),
    ("mamba2", GPT2, False, "mpt"),
    ("phi", GPT2, False, "phi-2"),
    ("phi3", then(cut(LLAMA3), BYTES), False, "dbrx"),
    ("phi3", then(cut(O200K), BYTES), False, "gpt-4o"),
    ("exaone4", GPT2, False, "exaone4"),
    ("hunyuan_v1_moe", then(cut(QWEN2), BYTES), False, "hunyuan"),
    ("bloom", then(cut(" ?[^(\\s|[.,!?…。，、।۔،])]+"), BYTES), False, "bloom"),
    ("modernbert", GPT2, False, "modern-bert"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "node", "ignore_merges", "name"), MODELS, ids=[f"{m[0]} {m[3]}" for m in MODELS]
)
def test_names_equal_llama_cpp(model_type, node, ignore_merges, name):
    family = families.of({"model_type": model_type})
    found = recognition.recognise(node, ignore_merges=ignore_merges, whole=True, prefer=family.pre)
    assert found is not None and found[0] == name and name in found[1].names


@pytest.mark.parametrize(
    ("node", "ignore_merges", "name"),
    [
        (then(cut(LLAMA3)), True, "llama-bpe"),
        (then(cut(LLAMA3), BYTES), False, "smaug-bpe"),
        (then(cut(O200K), BYTES), True, "granite-embed-multi-97m"),
        (then(cut(LLAMA3, "Removed", True), BYTES), True, "llama-bpe"),
        (then(cut(LLAMA3.replace(r"\r", "\r").replace(r"\n", "\n")), BYTES), True, "llama-bpe"),
        (then(cut(QWEN2), BYTES), True, "qwen2"),
        # An unknown spelling, recognised by its behaviour.
        (then(cut(LLAMA3.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)")), BYTES), True, "llama-bpe"),
        (then(cut(QWEN2.replace(r"\s*[\r\n]+", r"\s*[\r\n]")), BYTES), False, "qwen2"),
        (then(cut(QWEN2.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", CONTRACTIONS)), BYTES), False, "qwen2"),
        (then(cut(r"\p{Nd}|\p{Nl}|\p{No}"), GPT2), False, "smollm"),
        (then(cut(r"\n+"), cut(QWEN2), BYTES), False, "laguna"),
        (then(cut(QWEN2, "Removed"), BYTES), False, None),
        ({**GPT2, "add_prefix_space": True}, False, None),
        (then({"type": "Whitespace"}, BYTES), False, None),
        (then(cut("(a+)+$"), BYTES), False, None),
        ({"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False}, False, None),
        (None, False, None),
    ],
)  # fmt: skip
def test_recognised_pre_tokenizers(node, ignore_merges, name):
    found = recognition.recognise(node, ignore_merges=ignore_merges)
    assert (found and found[0]) == name


def test_an_invalid_stage_is_a_one_line_error():
    for node in (then(cut("(")), {"type": "Sequence", "pretokenizers": 3}, {"type": 1}):
        with pytest.raises(InputError, match="pre-tokenizer") as caught:
            recognition.recognise(node, ignore_merges=False)
        assert "\n" not in str(caught.value)


def test_the_probe_distinguishes_all_kinds_that_differ():
    alike = {frozenset(("qwen2", "bailingmoe"))}  # possessive spellings of the same cut
    for a, b in itertools.combinations([k for k in KINDS if not k.raw], 2):
        same = recognition.same(to_json(a), to_json(b))
        assert same == (a.splits == b.splits or frozenset((a.names[0], b.names[0])) in alike), (a.names[0], b.names[0])


def test_the_names_are_unambiguous():
    names = [name for k in KINDS for name in k.names]
    assert len(names) == len(set(names))
    assert all(kind_of(name) for f in families.FAMILIES for name in f.pre if name != "bert-bge")


@settings(deadline=None, max_examples=150)
@given(st.text(alphabet=st.sampled_from(sorted(set("".join(recognition.PROBE)))), max_size=40))
def test_kinds_with_equal_probes_split_every_text_equally(text):
    for spelt in (
        QWEN2.replace(r"\s*[\r\n]+", r"\s*[\r\n]"),
        QWEN2.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", CONTRACTIONS),
    ):
        node = then(cut(spelt), BYTES)
        found = recognition.recognise(node, ignore_merges=False)
        assert found is not None
        a, b = (engine.stage("pre_tokenizer", n).pre_tokenize_str(text) for n in (node, to_json(found[1])))
        assert [piece for piece, _ in a] == [piece for piece, _ in b]


ODD = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(use_regex=False)])


def folder(path, made) -> dict[str, Any]:
    (path / "tokenizer.json").write_text(made if isinstance(made, str) else made.to_str())
    return {"tokenizer.json": path / "tokenizer.json"}


def test_an_unknown_pre_tokenizer_is_refused_and_can_be_named(tmp_path):
    files = folder(tmp_path, byte_level(ODD))
    with pytest.raises(UnsupportedError) as caught:
        tokenizer.from_files(files, {})
    said = str(caught.value)
    assert "Whitespace" in said and "--pre-tokenizer" in said and "\n" not in said
    assert tokenizer.from_files(files, {}, pre="qwen2").pre == "qwen2"
    with pytest.raises(UnsupportedError, match="known are gpt-2"):
        tokenizer.from_files(files, {}, pre="qwen9")


def test_without_the_package_known_spellings_are_recognised(tmp_path, monkeypatch):
    known = folder(tmp_path, byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert tokenizer.from_files(known, {}).pre == "gpt-2"
    body = json.loads(known["tokenizer.json"].read_text())
    body["pre_tokenizer"] = then({"type": "Whitespace"}, BYTES)
    with pytest.raises(UnsupportedError, match=r"pip install 'polyquant\[run\]'"):
        tokenizer.from_files(folder(tmp_path, json.dumps(body)), {})


def test_ignore_merges_matters_only_for_unreachable_words(tmp_path):
    body = json.loads(byte_level(engine.stage("pre_tokenizer", then(DIGITS, GPT2)), ignore_merges=True).to_str())
    assert tokenizer.from_files(folder(tmp_path, json.dumps(body)), {}).warnings == ()
    body["model"]["vocab"]["Ġunreachable"] = len(body["model"]["vocab"])
    found = tokenizer.from_files(folder(tmp_path, json.dumps(body)), {})
    assert found.pre == "smollm" and "merges every word" in found.warnings[0]
