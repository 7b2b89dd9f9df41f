"""How a byte-level BPE cuts text into words before merging: the pre_tokenizer of tokenizer.json <-> `tokenizer.ggml.pre`.

tokenizer.json says it as a tree of splits; llama.cpp as a name with a list of regular expressions built in, each applied to the pieces
that the one before it left. Both are brought to that list, so that two spellings of the same cut meet. Some names also imply that a
whole word found in the vocabulary is not merged (`ignore_merges`) and that a BOS token is put in front unless the file says otherwise.

Source of the names: llama.cpp's src/llama-vocab.cpp. Names that stand for the same list are read alike; the first one is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["KINDS", "PreTokenizer", "kind_of", "recognise", "to_json"]

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_TAIL = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_TAIL}"
_QWEN2 = rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_TAIL}"
_QWEN35 = rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
_TEKKEN = _CASED % ("", "") + r"|\p{N}" + _CASED_TAIL
_GPT4O = _CASED % (f"{_WORDS}?", f"{_WORDS}?") + r"|\p{N}{1,3}" + _CASED_TAIL
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACE
)
_SEED = rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_CJK_OLD = "[一-龥ࠀ-一가-\ud7ff]+"
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to cut. names: all that llama.cpp gives it, the one to write first. add_bos: llama.cpp's default for these names."""

    names: tuple[str, ...]
    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


KINDS = (
    PreTokenizer(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0", "mellum", "modern-bert",
         "exaone4", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code", "roberta-bpe"),
        (GPT2,),
    ),
    PreTokenizer(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        (_LLAMA3,),
        ignore_merges=True,
        add_bos=True,
    ),
    PreTokenizer(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    PreTokenizer(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2"),
                 (_QWEN2,), nfc=True),
    PreTokenizer(("qwen35",), (_QWEN35,), nfc=True),
    PreTokenizer(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), (r"\p{N}", GPT2)),
    PreTokenizer(("tekken",), (_TEKKEN,), ignore_merges=True, add_bos=True),
    PreTokenizer(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (_GPT4O,)),
    PreTokenizer(("deepseek-v3", "hunyuan-dense", "joyai-llm"), (r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
    PreTokenizer(("deepseek-coder",), (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_OLD, r"\p{N}")),
    PreTokenizer(("seed-coder",), (_SEED,)),
    PreTokenizer(("bailingmoe", "bailingmoe2", "llada-moe"), (_BAILING,)),
    PreTokenizer(("default",), (_PUNCTUATION, GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
)  # fmt: skip

_BY_NAME = {name: kind for kind in KINDS for name in kind.names}


def kind_of(name: str) -> PreTokenizer | None:
    """The kind that llama.cpp means by a name."""
    return _BY_NAME.get(name)


def recognise(pre_tokenizer: Any, *, ignore_merges: bool) -> PreTokenizer | None:
    """The kind that equals a pre_tokenizer of tokenizer.json; None if llama.cpp has none that we know."""
    splits = _splits(pre_tokenizer)
    if splits is None:
        return None
    return next((k for k in KINDS if k.ignore_merges == ignore_merges and k.splits == splits), None)


def _splits(node: Any) -> tuple[str, ...] | None:
    """The tree of splits as a list of expressions in one spelling; None if it holds something else."""
    found: tuple[str, ...] | None = None
    match node:
        case {"type": "Sequence", "pretokenizers": [*children]}:
            inner = [_splits(child) for child in children]
            found = None if None in inner else tuple(s for part in inner for s in part or ())
        case {"type": "ByteLevel", "add_prefix_space": True}:
            found = None
        case {"type": "ByteLevel"}:
            found = (GPT2,) if node.get("use_regex", True) else ()
        case {"type": "Digits"}:
            found = (r"\p{N}",) if node.get("individual_digits") else (r"\p{N}+",)
        case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": way}:
            # Cut out and thrown away, inverted, is what matches: the same as isolated for expressions that match everything.
            if (way, bool(node.get("invert"))) in (("Isolated", False), ("Removed", True)):
                found = (_spelling(regex),)
    return found


def _spelling(regex: str) -> str:
    """One of several spellings of the same expression."""
    regex = regex.replace("\r", r"\r").replace("\n", r"\n")
    return regex.replace("(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", _WORDS)


def to_json(kind: PreTokenizer) -> dict[str, Any]:
    """The pre_tokenizer of tokenizer.json that cuts like `kind`."""
    end = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": kind.splits[-1] == GPT2}
    splits = kind.splits[:-1] if kind.splits[-1] == GPT2 else kind.splits
    nodes: list[dict[str, Any]] = [
        {"type": "Digits", "individual_digits": True}
        if s == r"\p{N}"
        else {"type": "Split", "pattern": {"Regex": s}, "behavior": "Isolated", "invert": False}
        for s in splits
    ]
    return {"type": "Sequence", "pretokenizers": [*nodes, end]} if nodes else end
