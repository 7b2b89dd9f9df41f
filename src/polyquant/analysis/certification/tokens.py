"""Compare two tokenizers: vocabulary, merges, special tokens, splitting, chat templates, and encoded samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyquant.errors import PolyquantError, printable
from polyquant.storage import strict_json
from polyquant.tokenizers import pretokenizers, vocabulary
from polyquant.tokenizers.reading import from_files
from polyquant.tokenizers.tokenizer import Tokenizer, open_tokenizer
from polyquant.tokenizers.vocabulary import CONTROL, NORMAL, UNKNOWN, UNUSED, USER, Vocabulary
from polyquant.types import Checkpoint

__all__ = ["SAMPLES", "check_tokenizer", "read_vocabulary"]

SAMPLES = (
    "The quick brown fox jumps over the lazy dog. It doesn't stop: 1234567 and 3.14159, on and on ...",
    "  Two leading spaces,\n\n\ttabs and\r\nline ends   ",
    "Größe, naïve café; Ελληνικά, Русский текст, 日本語のテキスト, 한국어 문장 🙂🏳️‍🌈",
    "def f(x):\n    return x**2 + 1  # don't\n",
)
Difference = tuple[str, str]


def check_tokenizer(source: Checkpoint, target: Checkpoint, rows: int | None = None) -> tuple[list[Difference], str]:
    """((code, message) of each difference, how they were compared). rows: of the embedding."""
    if _equal_files(source, target):
        return [], "equal files"
    found: list[Difference] = []
    vocabularies = []
    for side, checkpoint in (("source", source), ("target", target)):
        try:
            vocabularies.append(read_vocabulary(checkpoint, rows))
        except PolyquantError as problem:
            found.append(("CER047", f"the {side}'s tokenizer cannot be compared: {problem}"))
    if len(vocabularies) == 2:
        a, b = vocabularies
        found += _differences(a, b)
    else:
        return found, "not compared"
    how = "vocabularies"
    if not a.tokens and not b.tokens:
        return found, "no tokenizer" if not a.templates and not b.templates else "chat templates"
    lost = _lost(source, target, rows)
    if not found and lost:
        return [("CER062", lost)], "vocabularies"
    if not found:
        encoded, note = _encoded(source, target)
        found, how = encoded, how + note
    if source.naming == target.naming != "gguf":
        found += _added(source, target, {code for code, _ in found}, encoded=how.endswith("samples"))
    return found, how


def read_vocabulary(checkpoint: Checkpoint, rows: int | None) -> Vocabulary:
    """The tokenizer of either naming scheme as a reader of GGUF sees it. Raises PolyquantError."""
    if checkpoint.naming == "gguf":
        return vocabulary.from_metadata(checkpoint.metadata, file=checkpoint.path)
    found = from_files(checkpoint.files, checkpoint.config, rows=rows)
    if not found.tokens:
        return found
    metadata = {key: meta.value for key, meta in found.metadata().items()}
    return vocabulary.from_metadata(metadata, file=checkpoint.path)


def _lost(source: Checkpoint, target: Checkpoint, rows: int | None) -> str:
    """The properties that llama.cpp's converter does not write, or ""."""
    if source.naming == "gguf" or target.naming != "gguf":
        return ""
    found = from_files(source.files, source.config, rows=rows)
    if "add_space_prefix" in found.omits and found.space_prefix is False:
        return "llama.cpp's converter does not write add_space_prefix: readers of GGUF put a space before every input"
    return ""


def _equal_files(source: Checkpoint, target: Checkpoint) -> bool:
    """True if both folders have the same tokenizer files, byte for byte."""
    names = {n for c in (source, target) for n in c.files if _is_tokenizer(n)}
    if source.naming == "gguf" or target.naming == "gguf" or not names:
        return False
    return all(
        n in source.files
        and n in target.files
        and source.files[n].stat().st_size == target.files[n].stat().st_size
        and source.files[n].read_bytes() == target.files[n].read_bytes()
        for n in names
    )


def _is_tokenizer(name: str) -> bool:
    words = ("token", "vocab", "merges", "spiece", "sentencepiece", "tekken", "chat_template")
    return any(word in name for word in words)


def _differences(a: Vocabulary, b: Vocabulary) -> Iterator[Difference]:
    if bool(a.tokens) != bool(b.tokens):
        side = "target" if a.tokens else "source"
        yield "CER047", f"the {side} has no tokenizer that can be read"
    elif a.tokens:
        if a.model != b.model:
            yield "CER047", f"the tokenizer is of kind '{b.model}', expected '{a.model}'"
            return
        yield from _lists(a, b)
        yield from _settings(a, b)
    for name in sorted({*a.templates, *b.templates}):
        if a.templates.get(name) != b.templates.get(name):
            what = "is missing" if name not in b.templates else "is new" if name not in a.templates else "differs"
            yield "CER046", f"the chat template '{name}' {what}"


def _lists(a: Vocabulary, b: Vocabulary) -> Iterator[Difference]:
    tokens = _first(a.tokens, b.tokens)
    if tokens is not None:
        at, x, y = tokens
        yield "CER040", f"token {at} is {printable(repr(y), 60)}, expected {printable(repr(x), 60)}"
        return
    if (types := _first(_kinds(a.types), _kinds(b.types))) is not None:
        at, x, y = types
        yield "CER043", f"token {at} ({printable(repr(a.tokens[at]), 40)}) has type {y}, expected {x}"
    if a.scores and b.scores:
        pairs = enumerate(zip(a.scores, b.scores, a.types, strict=False))
        at = next((i for i, (x, y, kind) in pairs if kind in (NORMAL, USER) and abs(x - y) > 1e-4), -1)
        if at >= 0:
            yield "CER041", f"the score of token {at} is {b.scores[at]:g}, expected {a.scores[at]:g}"
    if (merges := _first(a.merges, b.merges)) is not None:
        at, x, y = merges
        yield "CER041", f"merge {at} is {printable(repr(y), 60)}, expected {printable(repr(x), 60)}"


def _kinds(types: Sequence[int]) -> list[int]:
    """Types as far as they have an effect: the unknown token is a control token, an unused one is never produced."""
    return [{UNKNOWN: CONTROL, UNUSED: NORMAL}.get(kind, kind) for kind in types]


def _first(a: Sequence[Any], b: Sequence[Any]) -> tuple[int, Any, Any] | None:
    """(index, a's entry, b's entry) of the first difference."""
    if a == b:
        return None
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i, x, y
    if len(a) == len(b):
        return None
    i = min(len(a), len(b))
    return i, a[i] if i < len(a) else None, b[i] if i < len(b) else None


def _settings(a: Vocabulary, b: Vocabulary) -> Iterator[Difference]:
    for kind in sorted({*a.special, *b.special}):
        x, y = a.special.get(kind), b.special.get(kind)
        if x != y and ((x is not None and y is not None) or kind in ("bos", "eos")):
            yield "CER042", f"the id of {kind} is {y}, expected {x}"
    if a.pre != b.pre and (
        pretokenizers.kind_of(a.pre) is None or pretokenizers.kind_of(a.pre) != pretokenizers.kind_of(b.pre)
    ):
        yield "CER044", f"the pre-tokenizer is '{printable(b.pre)}', expected '{printable(a.pre)}'"
    for kind in ("bos", "eos"):
        if a.added(kind) != b.added(kind):
            yield "CER045", f"{kind} is {'added' if b.added(kind) else 'not added'}, expected the opposite"
    for name in ("space_prefix", "collapse_spaces", "lowercase", "strip_accents", "charsmap"):
        x, y = getattr(a, name), getattr(b, name)
        if x != y and x is not None and y is not None:
            yield "CER044", f"{name} differs"
    if a.prefix and b.prefix and a.prefix != b.prefix:
        yield "CER045", f"inputs start with {list(b.prefix)}, expected {list(a.prefix)}"


def _added(source: Checkpoint, target: Checkpoint, known: set[str], *, encoded: bool) -> Iterator[Difference]:
    """Differences of two tokenizer.json files that a vocabulary does not hold. encoded: samples gave equal ids."""
    bodies = []
    for checkpoint in (source, target):
        path = checkpoint.files.get("tokenizer.json")
        if path is None:
            return
        bodies.append(strict_json.typed(strict_json.read(path, strict_json.TOKENIZER), dict, path.name, file=path))
    a, b = bodies
    if not known & {"CER040", "CER043"}:
        for i, (x, y) in _by_id(a, b).items():
            if x != y:
                yield "CER043", f"the added token {i} differs: {printable(y, 90)}, expected {printable(x, 90)}"
                break
    for stage in () if encoded else ("normalizer", "pre_tokenizer"):
        if a.get(stage) != b.get(stage) and "CER044" not in known:
            yield "CER044", f"the {stage} of tokenizer.json differs"


def _by_id(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[Any, tuple[Any, Any]]:
    x, y = ({t.get("id"): t for t in body.get("added_tokens") or [] if isinstance(t, dict)} for body in (a, b))
    return {i: (x.get(i), y.get(i)) for i in (*x, *(i for i in y if i not in x))}


def _encoded(source: Checkpoint, target: Checkpoint) -> tuple[list[Difference], str]:
    """Encode samples with both tokenizers."""
    engines: list[Tokenizer] = []
    for checkpoint in (source, target):
        try:
            engines.append(open_tokenizer(checkpoint))
        except (PolyquantError, ImportError) as problem:
            return [], f" (samples were not encoded: {printable(problem, 120)})"
    for i, text in enumerate(SAMPLES):
        a, b = (engine.encode(text, add_special=False) for engine in engines)
        if list(a) != list(b):
            at = next((j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            return [("CER048", f"sample {i} gives other ids from position {at}: {b[at : at + 4]}, expected "
                     f"{a[at : at + 4]}")], ""  # fmt: skip
    return [], f" and {len(SAMPLES)} encoded samples"
