"""Find llama.cpp's pre-tokenizer that splits text like a tokenizer.json.

First by spelling: both sides as lists of expressions (pretokenizers.py). Otherwise by behaviour: the `tokenizers`
package runs the stage on a probe text, and its result is compared with that of each kind. The probe covers all
differences between the kinds: letters of many scripts with and without case, combining marks, digits of several kinds
and lengths, contractions in both cases, ASCII and other punctuation, runs of spaces, tabs and line ends, slashes before
line ends, emoji.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from polyquant.errors import UnsupportedError, printable
from polyquant.tokenizers import engine, pretokenizers
from polyquant.tokenizers.pretokenizers import GPT2, KINDS, PUNCTUATION, PreTokenizer, spelling, to_json

__all__ = ["PROBE", "named", "recognise", "same", "unknown"]

PROBE = (
    "I'm sure we'Ve said they'LL go; don't, it'S he'd 'tis O'Neil's rock'n'roll d'accord L'Été",
    "HelloWorld fooBarBAZ iPhone XMLHttp ABCdef ÀÉÎõü Straße ΑΒΓδε ПриВет Ǆuro ǅ ʰmod ªº ﬁn",
    "1 12 123 1234 12345 123456 1234567 3.14159 1,000,000 x2 2x v1.2.3 a1b22c333 ٣٤٥٦٧ १२३ ½ ² Ⅷ 1½²",
    "東京は日本の首都です。2024年、カタカナ한국어 단어조선 ㄱㄴ 北京市 㐀㐁 ㄅㄆ，“引用”！…（括号）…一丁",
    "e\u0301te\u0301 Vie\u0323\u0302t हिन्दी में নমস্কার ไทยก็ดี עִבְרִית العَرَبِيَّة၊ မြန်မာ ភាសាខ្មែរ ລາວ ꧠꩠ",
    "!!! ??? ... --- === *** ((a)) [b] {c} <d> #e @f $9 %g ^h &i _j_ `k` ~l| a+b=c \\n a/b http://x.y/z?q=1&r",
    "x!\n\nfoo();\r\n\treturn /* c */\n//\n/\n\n ok /\r\n\n -/\n",
    "a  b   c    d         e\t\tf \t g\u00a0h\u3000i\u2003j  \n   k\n\n\n  l \n \n m   ",
    "  leading\n\n\n\ntrailing   \n \t ",
    "🙂🚀 👨\u200d👩\u200d👧 ✅️ ™ © ₿ € £5 ∑∫ →x ←  •item\n•  «q» ‹r› „s“ —t– ‘u’",
    "<sentinel:12> IMGIMGABCDZ x<sentinel:3>y I D'S '' 'S 'x \"'re\" _'ll 'VE",
    "Ankara'dan x'tisz y'REst n  12 \n  345   x",
    "word,word;word।अंत۔ اور، (a|b) .b ,c !d a, b. c! d?",
)  # fmt: skip
"""Lines on which every two kinds with different expressions differ (ensured by
tests/tokenizers/test_recognition.py)."""


_OTHER_SPELLINGS: dict[tuple[str, ...], tuple[str, ...]] = {
    # Falcon splits off digits after converting to bytes, where it also splits byte letters: llama.cpp gets the same
    # tokens without.
    (PUNCTUATION, GPT2, r"\p{N}+", "[0-9][0-9][0-9]"): (PUNCTUATION, GPT2, "[0-9][0-9][0-9]"),
}


def recognise(
    node: Any, *, ignore_merges: bool, whole: bool = False, prefer: Sequence[str] = (), file: object = None
) -> tuple[str, PreTokenizer] | None:
    """Return (name, kind) of the pre-tokenizer equivalent to one of tokenizer.json; None if llama.cpp has none.

    Of equivalent kinds, the one that agrees on `ignore_merges` is used, unless merging finds all whole words (`whole`):
    then first the one with a name in `prefer`. Its first name in `prefer` is returned. Raises InputError for a stage
    that cannot be run, UnsupportedError if it must be run and the package is not installed.
    """
    splits = _splits(node)
    splits = _OTHER_SPELLINGS.get(splits, splits) if splits is not None else None
    candidates = [k for k in KINDS if not k.raw and k.splits == splits]
    if not candidates and isinstance(node, Mapping):
        candidates = _by_behaviour(node, file)
    if not candidates:
        return None

    def rank(kind: PreTokenizer) -> tuple[bool, bool, bool]:
        differs = kind.ignore_merges != ignore_merges
        return differs and not whole, not set(prefer) & set(kind.names), differs

    best = min(candidates, key=rank)
    return next((name for name in prefer if name in best.names), best.names[0]), best


def same(node: Any, other: Mapping[str, Any], *, file: object = None) -> bool:
    """True if two pre-tokenizers split the probe equally.

    Raises InputError and UnsupportedError as `recognise` does.
    """
    return bool(node == other) or (isinstance(node, Mapping) and _run(node, file) == _run(other, file))


def named(name: str, *, file: object = None) -> PreTokenizer:
    """Return the kind of a name given by the user. Raises UnsupportedError."""
    kind = pretokenizers.kind_of(name)
    if kind is None:
        known = ", ".join(n for k in KINDS for n in k.names)
        raise UnsupportedError(f"no pre-tokenizer is called '{printable(name)}'", file=file, hint=f"known are {known}")
    return kind


def unknown(node: Any, file: object) -> UnsupportedError:
    """Return the error for a stage without an equivalent kind."""
    regexes = list(_regexes(node))
    return UnsupportedError(
        "llama.cpp has no pre-tokenizer that splits text like this one",
        file=file,
        found=" then ".join(regexes) if regexes else node,
        hint="choose the nearest one: --pre-tokenizer NAME (pre_tokenizer= in Python), e.g. gpt-2, llama-bpe, qwen2",
    )


def _regexes(node: Any) -> Iterator[str]:
    match node:
        case {"pretokenizers": [*children]}:
            for child in children:
                yield from _regexes(child)
        case {"type": "Split", "pattern": {"Regex": str(regex)}}:
            yield regex
        case {"type": str(kind)} if kind != "ByteLevel":
            yield kind


# ---------------------------------------------------------------- by spelling


def _splits(node: Any) -> tuple[str, ...] | None:
    """Return the tree of splits as a list of normalized expressions; None if it holds anything else."""
    splits: tuple[str, ...] | None = None
    match node:
        case {"type": "Sequence", "pretokenizers": [*children]}:
            inner = [_splits(child) for child in children]
            splits = None if None in inner else tuple(s for part in inner for s in part or ())
        case {"type": "ByteLevel", "add_prefix_space": True}:
            splits = None
        case {"type": "ByteLevel"}:
            splits = (GPT2,) if node.get("use_regex", True) else ()
        case {"type": "Digits"}:
            splits = (r"\p{N}",) if node.get("individual_digits") else (r"\p{N}+",)
        case {"type": "Punctuation", "behavior": ("Contiguous" | "Isolated") as way}:
            splits = (PUNCTUATION if way == "Contiguous" else PUNCTUATION.removesuffix("+"),)
        case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": way}:
            # Inverted removal keeps the matches: equal to isolation for expressions that match everything.
            if (way, bool(node.get("invert"))) in (("Isolated", False), ("Removed", True)):
                splits = (spelling(regex),)
    return splits


# ---------------------------------------------------------------- by behaviour


def _by_behaviour(node: Mapping[str, Any], file: object) -> list[PreTokenizer]:
    """Return the kinds that split the probe like the stage."""
    pieces = _run(node, file)
    return [k for k in KINDS if not k.raw and _pieces_of(k) == pieces]


def _run(node: Mapping[str, Any], file: object) -> list[list[str]]:
    if not engine.installed():
        raise UnsupportedError(
            "this pre-tokenizer is not spelled like a known one, and recognizing it by behaviour requires "
            "the package 'tokenizers'",
            file=file,
            hint="pip install 'polyquant[run]', or name it: --pre-tokenizer NAME",
        )
    return engine.guarded(lambda: _pieces(node), "the pre-tokenizer of tokenizer.json cannot be used", file)


def _pieces(node: Mapping[str, Any]) -> list[list[str]]:
    run = engine.stage("pre_tokenizer", node)
    return [[piece for piece, _ in run.pre_tokenize_str(text)] for text in PROBE]


@cache
def _pieces_of(kind: PreTokenizer) -> list[list[str]]:
    return _pieces(to_json(kind))
