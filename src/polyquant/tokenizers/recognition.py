"""Which of llama.cpp's pre-tokenizers cuts text as a tokenizer.json does.

First by spelling: both sides as lists of expressions (pretokenizers.py). Where the spelling is unknown, by behaviour: the stage is run by
the `tokenizers` package on a probe text and compared with what each kind makes of it. The probe holds what the kinds treat differently:
letters of many scripts with case and without, combining marks, digits of several kinds and lengths, contractions in both cases,
punctuation of ASCII and beyond, runs of spaces, tabs and line ends, slashes before line ends, emoji.
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
"""Texts on which every two kinds with different expressions differ (tests/tokenizers/test_recognition.py holds them to it)."""


_OTHER_SPELLINGS: dict[tuple[str, ...], tuple[str, ...]] = {
    # Falcon cuts its digits off after the bytes are made, where it cuts letters of bytes as well: llama.cpp comes to the same tokens without.
    (PUNCTUATION, GPT2, r"\p{N}+", "[0-9][0-9][0-9]"): (PUNCTUATION, GPT2, "[0-9][0-9][0-9]"),
}


def recognise(
    node: Any, *, ignore_merges: bool, whole: bool = False, prefer: Sequence[str] = (), file: object = None
) -> tuple[str, PreTokenizer] | None:
    """(name, kind) of what cuts as a pre_tokenizer of tokenizer.json does; None if llama.cpp has none.

    Of kinds that cut alike the one that agrees on `ignore_merges` is taken, unless merging finds all words whole (`whole`): then first
    the one with a name in `prefer`. Of its names the first in `prefer` is. Raises InputError for a stage that cannot be run, UnsupportedError
    where only running it could tell and the package is not installed.
    """
    splits = _splits(node)
    splits = _OTHER_SPELLINGS.get(splits, splits) if splits is not None else None
    found = [k for k in KINDS if not k.raw and k.splits == splits]
    if not found and isinstance(node, Mapping):
        found = _by_behaviour(node, file)
    if not found:
        return None

    def rank(kind: PreTokenizer) -> tuple[bool, bool, bool]:
        differs = kind.ignore_merges != ignore_merges
        return differs and not whole, not set(prefer) & set(kind.names), differs

    best = min(found, key=rank)
    return next((name for name in prefer if name in best.names), best.names[0]), best


def same(node: Any, other: Mapping[str, Any], *, file: object = None) -> bool:
    """Whether two pre-tokenizers cut the probe alike. Raises InputError and UnsupportedError as `recognise` does."""
    return bool(node == other) or (isinstance(node, Mapping) and _run(node, file) == _run(other, file))


def named(name: str, *, file: object = None) -> PreTokenizer:
    """The kind of a name that a user asks for. Raises UnsupportedError."""
    kind = pretokenizers.kind_of(name)
    if kind is None:
        known = ", ".join(n for k in KINDS for n in k.names)
        raise UnsupportedError(f"no pre-tokenizer is called '{printable(name)}'", file=file, hint=f"known are {known}")
    return kind


def unknown(node: Any, file: object) -> UnsupportedError:
    """What to say where no kind cuts as the stage does."""
    regexes = list(_regexes(node))
    return UnsupportedError(
        "llama.cpp has no pre-tokenizer that cuts text as this one does",
        file=file,
        found=" then ".join(regexes) if regexes else node,
        hint="name the nearest one yourself: --pre-tokenizer NAME (pre_tokenizer= in Python), e.g. gpt-2, llama-bpe, qwen2",
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
        case {"type": "Punctuation", "behavior": ("Contiguous" | "Isolated") as way}:
            found = (PUNCTUATION if way == "Contiguous" else PUNCTUATION.removesuffix("+"),)
        case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": way}:
            # Cut out and thrown away, inverted, is what matches: the same as isolated for expressions that match everything.
            if (way, bool(node.get("invert"))) in (("Isolated", False), ("Removed", True)):
                found = (spelling(regex),)
    return found


# ---------------------------------------------------------------- by behaviour


def _by_behaviour(node: Mapping[str, Any], file: object) -> list[PreTokenizer]:
    """Kinds whose pieces of the probe are those of the stage."""
    pieces = _run(node, file)
    return [k for k in KINDS if not k.raw and _pieces_of(k) == pieces]


def _run(node: Mapping[str, Any], file: object) -> list[list[str]]:
    if not engine.installed():
        raise UnsupportedError(
            "this pre-tokenizer is not spelt as any that is known, and telling it by what it does needs the package 'tokenizers'",
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
