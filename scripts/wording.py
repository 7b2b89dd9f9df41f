"""Find docstrings, comments and messages that read as translated, and name the plain wording.

    python scripts/wording.py [PATH...]      one line per hit, then `N of M (x %)`; exit status 1 above LIMIT

A passage is a docstring, a block of comment lines, or a string of at least four words: messages, help texts,
explanations of findings.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = (ROOT / "src" / "polyquant", ROOT / "scripts", ROOT / "native")
OTHERS = (ROOT / "tests", ROOT / "bench", ROOT / "examples")
"""Checked separately from DEFAULT: each group has to be below LIMIT."""
OWN = {Path(__file__).resolve(), ROOT / "tests" / "scripts" / "test_wording.py"}
"""The rules and their test, which quote the phrases."""
LIMIT = 0.01
"""Largest share of passages with a hit that the house check accepts."""

RULES: tuple[tuple[str, str], ...] = (
    # Sentences that are fragments or inverted
    (
        r"^(?:What|Where|How|Whether|Why|Who|Whose|Whatever|That)\b(?![^.\n]*\?)(?! [^.]*, (?:is|are)\b)",
        "'Return ...', 'True if ...', or a noun",
    ),
    (r"^(?:what|how|whether) (?!if\b)", "a noun or a sentence"),
    (r"(?:^|[.;:] +)(?:Of|By|As|For|With|From|To|In|Without|After|Behind) (?:what|whom|those who)\b", "name the thing"),
    (r"(?:^|[.;:] +)Of (?:these|those|them|its|their|what|which|the|an?)\b", "start with the subject"),
    (r"(?:^|[.;] +)That (?:it|they|an?|the|this|these|no|one|what) ", "start with the subject"),
    (
        r"(?:^|[.;] +)(?:So (?:does|do|is|are|can)|Nor (?:does|do|is|are)|Were it|Had it|Should it|Not so|None but) ",
        "plain word order",
    ),
    (
        r"\bwhat "
        r"(?:is|are|was|were|has|have|had|it|they|he|no|only|all|others?|each|one|some|nothing|stands?|lies?|comes?"
        r"|goes?|gives?|takes?|holds?|keeps?|belongs?|follows?|remains?|makes?|reads?|writes?|needs?|fits?|cannot|can|may"
        r"|must|would|will|runs?|differs?)\b",
        "name the thing",
    ),
    (
        r"\b(?:of|from|with|by|for|in|to|without|into|on|than|as|but|behind|beside|and|or) what\b(?! to do\b)",
        "name the thing",
    ),
    # Negation by "no"
    (
        r"(?<!there )\b(?:is|are|was|were|be) no "
        r"(?!longer\b|more\b|other\b|such\b|need\b|way\b|reason\b|different\b|better\b)[a-z]",
        "is not a ...",
    ),
    (r"\b(?:knows?|brings?|needs?|takes?|means?|says?|tells?|does|do|gives?) (?:nothing|none)\b", "does not ..."),
    (
        r"\b(?:all|all \w+|nothing|nobody|none|no \w+|anything|everything|any \w+) but\b(?! also)|\bbut for\b",
        "except",
    ),
    (r"\bfor nothing\b|\bnothing else\b|\bnothing of\b", "no ..., not"),
    # Archaic and borrowed words
    (
        r"\b(?:anew|thereof|wherein|whereof|thence|thither|hither|henceforth|lest|hence|whilst|stead)\b",
        "again, of it, so that",
    ),
    (r"\b(?:nobody|somebody|everybody|anybody)\b", "no one, a caller, a user"),
    (r"\bstrangers?\b|\bpeople\b", "untrusted; users, human-readable"),
    (r"\bmend(?:s|ed|ing)?\b|\bset right\b|\bput right\b", "repair, fix"),
    (r"\bwhole numbers?\b", "integers"),
    (r"\bbeforehand\b|\bin the mean\b|\bat hand\b|\bfor good\b", "in advance, on average, available"),
    (r"\bbesides?\b", "next to, and, except"),
    (r"\bbehind\b", "after, at the end of"),
    (r"\bso (?:many|much)\b", "N, at most N, as many"),
    (r"\balike\b|\bone and the same\b|\bagain and again\b", "the same, equal, repeatedly"),
    (r"\btwins?\b|\bthe one door\b|\bcousins?\b|\bsiblings of\b", "equivalent, counterpart"),
    (r"\bverbs?\b", "command, function"),
    (
        r"\ba text\b(?! (?:file|model|encoder|decoder|tower|completion|table|column))|\btexts\b",
        "prompt, input text, strings",
    ),
    (
        r"\b(?:own|its|their|norm's|head's) numbers\b|\bso many numbers\b"
        r"|\bnumbers of (?:a|the|each|all) (?:head|tensor|row|norm|vector|block|matrix)\b",
        "values, elements",
    ),
    # Verbs that files and matrices do not do
    (r"\b(?:lie|lies|lay|lying)\b(?! out)", "is stored, is at"),
    (r"\bstands?\b(?!-in)|\bstood\b|\bstanding\b", "is, is stored, appears"),
    (
        r"\b(?:says|said|saying)\b"
        r"|\b(?:to|must|can|cannot|not|may|files|who|they|which|that|would|could|options|names) say\b",
        "specify, declare, contain, report",
    ),
    (r"\btold\b", "called with, given, known from"),
    (
        r"\b(?:is|are|was|were|be|been|being) asked\b|\bunasked\b|\bunsaid\b",
        "is called, is checked, is requested",
    ),
    (
        r"\bgo(?:es|ing)? (?:on|through|by|without|along)\b|\bwent (?:on|through|by)\b",
        "continue, pass, is dequantized",
    ),
    (r"\bputs? (?:\w+ )?together\b", "join, assemble, combine"),
    (r"\bbrings?\b|\bbrought\b|\bcarr(?:ied|y|ies) along\b", "provide, supply, copy"),
    (r"\bcomes? (?:to (?!an end)|of|along)\b|\bcame (?:to (?!pass)|of|along)\b", "result in, be"),
    (
        r"\btak(?:e|es|en|ing) up\b(?! to)|\bbroken off\b|\bleft aside\b|\bgiv(?:e|es|en) way\b",
        "resume, interrupted, skipped",
    ),
    (r"\bweigh(?:s|ed)?\b(?! (?:less|more|\d))", "importance, is weighted"),
    (r"\bh[oe]lds? (?:\w+ ){0,4}against\b", "compare with, check against"),
    (r"\bhangs? (?:on|from)\b|\bhung\b|\brests? on\b", "depends on"),
    (
        r"\bturned\b(?! (?:on|off|out|into))|\bturns (?!on\b|off\b|into\b|out\b)",
        "rotated, permuted, transposed",
    ),
    (
        r"\b(?:is|are|was|were|be) (?:not |already |all )?there\b(?! (?:an?|is|are)\b)|\b(?:is|are) met\b",
        "exists, is present",
    ),
    (r"\blook(?:s|ed)? (?:at|into)\b(?! (?:the )?(?:log|line))", "inspect, read, check"),
    # Grammar
    (
        r"\b(?:one|two|bytes?|bits?|entry|entries|lines?|steps?|scales?|floats?|numbers?) an? (?:weight|line|tensor"
        r"|token|row|layer|expert|channel|processor|value|number|block|group|head|matrix|window|column)\b",
        "per weight, per line",
    ),
    (
        r"\b(?:has|have|of|in|with|is|are) another "
        r"(?:shape|size|number|type|form|kind|order|length|width|dtype|spelling|count|name|layout)\b",
        "a different ...",
    ),
    (
        r"\b(?:each|every one) for itself\b|\bof (?:its|their) own\b|\bby themselves\b",
        "separate, separately",
    ),
    (r"\bon (?:its|their|the) way\b|\bthe way (?:back|there)\b", "during, the inverse"),
    (r"\bsuch (?:a|an) one\b|\bthe like of\b|\bmakes? (?:it|them|one) of\b", "plain noun"),
    (r"\bwhatever\b", "any, regardless of"),
    (r"\b(?:does|do|says|made|is|if) so\b", "repeat the verb"),
)
"""(pattern, plain wording) of phrases that readers stumble over."""
_PATTERNS = tuple((re.compile(pattern, 0 if "^" in pattern else re.IGNORECASE), advice) for pattern, advice in RULES)
_QUOTED = re.compile(r"``[^`]*``|`[^`\n]*`")
_WORDS = re.compile(r"(?:\b[A-Za-z][A-Za-z'-]*\b[ ,;:]+){3}[A-Za-z]")
_DRAWN = re.compile(r"^\s*(?:fmt:|type:|noqa|ruff:|-{4}|clang-format|NOLINT|!/)")


@dataclass(frozen=True, slots=True)
class Passage:
    """Prose at one place of a file."""

    path: Path
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Hit:
    """The first phrase of a passage that a rule matches, and the plain wording."""

    passage: Passage
    phrase: str
    advice: str


def passages(path: Path, source: str) -> Iterator[Passage]:
    """Docstrings, comments and messages of a Python file; comments of a C++ file."""
    if path.suffix != ".py":
        yield from _blocks(path, _cpp_comments(source))
        return
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    pieces = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        text = _string(node) if id(node) not in pieces else None
        if text is not None and (id(node) in docstrings or _WORDS.search(text)):
            yield Passage(path, getattr(node, "lineno", 1), text)
    comments = (
        (token.start[0], token.string.lstrip("#").strip())
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    )
    yield from _blocks(path, comments)


def _string(node: ast.AST) -> str | None:
    """The text of a string or an f-string, its fields replaced by a placeholder."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _cpp_comments(source: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.splitlines(), 1):
        comment = re.search(r"(?:^|[\s;{}(),])//+(.*)$", line)
        if comment is not None:
            yield number, comment[1].strip()


def _blocks(path: Path, comments: Iterable[tuple[int, str]]) -> Iterator[Passage]:
    """Join comments of consecutive lines."""
    first, lines = 0, [""]
    for number, text in comments:
        if _DRAWN.match(text):
            continue
        if lines[0] and number == first + len(lines):
            lines.append(text)
            continue
        if " ".join(lines).strip():
            yield Passage(path, first, "\n".join(lines))
        first, lines = number, [text]
    if " ".join(lines).strip():
        yield Passage(path, first, "\n".join(lines))


def hit(passage: Passage) -> Hit | None:
    """The first rule that the passage breaks, None if it breaks none. Code in backticks is not prose."""
    text = _QUOTED.sub("X", passage.text)
    text = re.sub(r"(?<!\n)[ \t]*\n[ \t]*(?!\n)", " ", text)  # phrases may be broken over two lines
    for pattern, advice in _PATTERNS:
        if match := pattern.search(text):
            return Hit(passage, match[0].strip(" .;:"), advice)
    return None


def check(paths: Iterable[Path]) -> tuple[list[Hit], int]:
    """Hits of all files at and under `paths`, and how many passages were read."""
    files = {f for p in paths for f in ([p] if p.is_file() else p.rglob("*")) if f.suffix in {".py", ".cpp", ".hpp"}}
    total, hits = 0, []
    for path in sorted(files - OWN):
        for passage in passages(path, path.read_text(encoding="utf-8")):
            total += 1
            if broken := hit(passage):
                hits.append(broken)
    return hits, total


def summary(hits: list[Hit], total: int) -> str:
    """`N of M (x %)`."""
    return (
        f"{len(hits)} of {total} docstrings, comments and messages read as translated ({len(hits) / max(1, total):.1%})"
    )


def described(found: Hit) -> str:
    """`path:line: 'phrase' (plain wording): text around it`."""
    path = found.passage.path
    text = " ".join(found.passage.text.split())
    start = max(0, text.find(found.phrase) - 60)
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return f"{name}:{found.passage.line}: '{found.phrase}' ({found.advice}): {text[start : start + 140]}"


def main(arguments: list[str]) -> int:
    """Print hits; 1 if more than LIMIT of the passages have one."""
    hits, total = check([Path(a).resolve() for a in arguments] or DEFAULT)
    print(*map(described, hits), summary(hits, total), sep="\n")
    return len(hits) > LIMIT * total


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
