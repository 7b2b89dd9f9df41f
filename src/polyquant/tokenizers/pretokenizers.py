"""Word splitting before BPE merges: the pre_tokenizer of tokenizer.json <-> `tokenizer.ggml.pre`.

tokenizer.json defines it as a tree of splits; llama.cpp as a name with a built-in list of regular expressions, each
applied to the pieces left by the previous one, where both matches and the text between them become pieces. Some names
also imply that a whole word in the vocabulary is not merged (`ignore_merges`), that a BOS token is added unless the
file overrides it, or that merges apply to text with ▁ for spaces instead of bytes (`raw`).

Source of the names: llama.cpp's src/llama-vocab.cpp. Names with the same splitting are equivalent when read; the first
one is written, unless the model's family has its own name (families.py). The expressions are those of the models' own
tokenizer.json. llama.cpp rewrites them for its engine, with two errors that we do not reproduce: in gpt-4o and tekken
it treats non-ASCII letters as both lower and upper case, and marks as neither; deepseek-llm keeps runs of digits, for
which that vocabulary has no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["GPT2", "KINDS", "PUNCTUATION", "PreTokenizer", "kind_of", "spelling", "to_json"]

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_TAIL = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_WORDS}|{_LETTERS}|\p{{N}}{{1,3}}{_TAIL}"
_QWEN2 = rf"{_WORDS}|{_LETTERS}|\p{{N}}{_TAIL}"
_QWEN35 = rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
_TEKKEN = _CASED % ("", "") + r"|\p{N}" + _CASED_TAIL
_GPT4O = _CASED % (f"{_WORDS}?", f"{_WORDS}?") + r"|\p{N}{1,3}" + _CASED_TAIL
_YOUTU = _CASED % (f"{_WORDS}?", f"{_WORDS}?") + r"|\p{N}" + _CASED_TAIL
_NO_HAN = _CASED.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
_KIMI = rf"[\p{{Han}}]+|{_NO_HAN % (f'{_WORDS}?', f'{_WORDS}?')}|\p{{N}}{{1,3}}{_TAIL}"
_ASCII_WORD = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
)
_DEEPSEEK3 = rf"{_ASCII_WORD}[\r\n]*|{_SPACE}"
_SPARK = rf"{_ASCII_WORD}|[\r\n]|\s+(?!\S)|\s+"
_SEED = rf"{_WORDS}|{_LETTERS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_HALVING = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s{1}"
_JAIS2 = rf"{_WORDS}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_HALVING}"
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_CJK_OLD = "[一-龥ࠀ-一가-\ud7ff]+"
_YOUTU_BLOCKS = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _CJK
_AFMOE_BLOCKS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-"
    "\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
"""The characters of tokenizer.json's `Punctuation`: ASCII and Unicode."""
_ALPHABETS = (
    "\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f"
    "\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-"
    "\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-"
    "\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183"
    "\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)
"""Letters with case, with an optional leading space, as DeepSeek-LLM lists them."""
_SYMBOLS = "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"
_LINES = r"[^\n]+|[\n]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A way to split words. names: all names in llama.cpp, the one to write first. add_bos: llama.cpp's default for
    these names.

    nfc: text is normalized to NFC first (llama.cpp never does that). raw: merges apply to text with ▁ for spaces, not
    to bytes.
    """

    names: tuple[str, ...]
    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False
    raw: bool = False


KINDS = (
    PreTokenizer(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0", "mellum",
            "modern-bert",
         "exaone4", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code", "roberta-bpe"),
        (GPT2,),
    ),
    PreTokenizer(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
            "jina-v5-nano"),
                 (_LLAMA3,), ignore_merges=True, add_bos=True),
    PreTokenizer(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    PreTokenizer(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "megrez", "hunyuan", "solar-open",
            "grok-2"),
                 (_QWEN2,), nfc=True),
    PreTokenizer(("qwen35",), (_QWEN35,), nfc=True),
    PreTokenizer(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        (r"\p{N}", GPT2)),
    PreTokenizer(("tekken",), (_TEKKEN,), ignore_merges=True, add_bos=True),
    PreTokenizer(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (_GPT4O,)),
    PreTokenizer(("granite-embed-multi-97m",), (_GPT4O,), ignore_merges=True),
    PreTokenizer(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    PreTokenizer(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), (r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
    PreTokenizer(("deepseek-coder",), (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_OLD, r"\p{N}")),
    PreTokenizer(("deepseek-llm",), (r"[\r\n]", _ALPHABETS, _SYMBOLS, r"\s+$", _CJK_OLD, r"\p{N}")),
    PreTokenizer(("spark2_5",), (r"\p{N}{1,3}", _CJK, _SPARK, r"\p{N}")),
    PreTokenizer(("youtu",), (_YOUTU_BLOCKS, _YOUTU), ignore_merges=True),
    PreTokenizer(("kimi-k2",), (_KIMI,)),
    PreTokenizer(("afmoe",), (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _AFMOE_BLOCKS, _DEEPSEEK3)),
    PreTokenizer(("minicpm5",), (r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), ignore_merges=True),
    PreTokenizer(("seed-coder",), (_SEED,)),
    PreTokenizer(("bailingmoe", "bailingmoe2", "llada-moe"), (_BAILING,)),
    PreTokenizer(("exaone-moe",), (_EXAONE_MOE,)),
    PreTokenizer(("jais-2",), (_JAIS2,)),
    PreTokenizer(("laguna",), (_LINES, _QWEN2)),
    PreTokenizer(("ufakzeka",), (_QWEN2.removeprefix(f"{_WORDS}|"),)),
    PreTokenizer(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    PreTokenizer(("viking",), (_BLOOM, r"\p{N}")),
    PreTokenizer(("chameleon",), (r"<sentinel:[0-9]+>", r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )",
            r"\p{N}",
                                  r"[\p{P}!-/:-@\[-`{-~]", GPT2), add_bos=True),
    PreTokenizer(("superbpe",), (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    PreTokenizer(("falcon",), (PUNCTUATION, GPT2, "[0-9][0-9][0-9]")),
    PreTokenizer(("default",), (PUNCTUATION.replace("`", ""), GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    PreTokenizer(("gemma4", "granite-embed-multi-311m"), (_LINES,), add_bos=True, raw=True),
    PreTokenizer(("sarvam-moe",), (_LINES,), raw=True),
)  # fmt: skip

_BY_NAME = {name: kind for kind in KINDS for name in kind.names}


def kind_of(name: str) -> PreTokenizer | None:
    """Return the kind of a llama.cpp name."""
    return _BY_NAME.get(name)


def spelling(regex: str) -> str:
    """Normalize equivalent spellings of an expression."""
    regex = regex.replace("\r", r"\r").replace("\n", r"\n").replace("\t", r"\t")
    return regex.replace("(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", _WORDS)


def to_json(kind: PreTokenizer) -> dict[str, Any]:
    """Return the equivalent pre_tokenizer of tokenizer.json; text of a raw kind is not converted to bytes."""
    nodes: list[dict[str, Any]] = []
    for s in kind.splits:
        if s == GPT2:
            nodes.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True})
        elif s == r"\p{N}":
            nodes.append({"type": "Digits", "individual_digits": True})
        else:
            nodes.append({"type": "Split", "pattern": {"Regex": s}, "behavior": "Isolated", "invert": False})
    if GPT2 in kind.splits[:-1]:  # bytes are made last: later splits need letters
        at = kind.splits.index(GPT2)
        nodes[at] = {"type": "Split", "pattern": {"Regex": GPT2}, "behavior": "Isolated", "invert": False}
    if not kind.raw and kind.splits[-1] != GPT2:
        nodes.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    return nodes[0] if len(nodes) == 1 else {"type": "Sequence", "pretokenizers": nodes}
