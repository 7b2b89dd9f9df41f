"""SentencePiece's unigram model between tokenizer files and GGUF (model `t5`).

Among all splits of the text into pieces, the one with the highest total score (log-probability) is used; characters
without a piece become the unknown token, consecutive ones a single token. Before that, characters are replaced by a
table (precompiled_charsmap), spaces are collapsed, one is prepended, and all become ▁.

XLM-RoBERTa's sentencepiece.bpe.model has other ids than its tokenizer.json: <s>, <pad>, </s>, <unk>, then the pieces
from the fourth on.

Source: SentencePiece's sentencepiece_model.proto; llm_tokenizer_ugm_session of llama.cpp's src/llama-vocab.cpp;
its converter for T5 and XLM-RoBERTa.
"""

from __future__ import annotations

import binascii
import math
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyquant.errors import InputError
from polyquant.storage import strict_json
from polyquant.storage.strict_json import typed
from polyquant.tokenizers import sentencepiece
from polyquant.tokenizers.pieces import space_prefix
from polyquant.tokenizers.special_tokens import nodes
from polyquant.tokenizers.token_table import BYTE_PIECE, Added, lay_out
from polyquant.tokenizers.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, Vocabulary

__all__ = ["from_json", "from_model", "read_pieces", "to_json"]

_UNUSED_SCORE, _ADDED_SCORE = -10000.0, 0.0
_FAIRSEQ = ("sentencepiece.bpe.model", ("<s>", "<pad>", "</s>", "<unk>"))
_SPACES = r" {2,}"


def read_pieces(model: Mapping[str, Any], file: Path) -> list[tuple[str, float]]:
    """Return (text, score) by id of a tokenizer.json's model. Raises InputError."""
    out = []
    for entry in typed(model.get("vocab"), list, "vocab", file=file):
        pair = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        text, score = pair
        if (
            not isinstance(text, str)
            or isinstance(score, bool)
            or not isinstance(score, int | float)
            or not math.isfinite(score)
        ):
            raise InputError("a piece is not a string with a score", file=file, found=entry)
        out.append((text, float(score)))
    return out


def from_json(
    body: Mapping[str, Any],
    added: list[Added],
    adds: Mapping[str, bool],
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    rows: int | None,
    file: Path,
) -> Vocabulary:
    """Return the vocabulary of a unigram model of a tokenizer.json. Raises InputError."""
    model = body["model"]
    pieces = read_pieces(model, file)
    table = lay_out([(text, i) for i, (text, _) in enumerate(pieces)], added, rows, file)
    types = [
        BYTE if t == NORMAL and BYTE_PIECE.fullmatch(x) else t for t, x in zip(table.types, table.tokens, strict=True)
    ]
    warnings = list(table.warnings)
    unknown = model.get("unk_id")
    if unknown is None:
        warnings.append("the model has no unknown token: llama.cpp writes one for characters without a piece")
    else:
        i = strict_json.integer(unknown, "unk_id", file=file)
        if i < len(types):
            types[i] = UNKNOWN
    if model.get("byte_fallback"):
        warnings.append("characters without a piece become bytes here; llama.cpp writes the unknown token for them")
    added_ids = {a.id for a in added}
    scores = [
        pieces[i][1] if i < len(pieces) else _ADDED_SCORE if i in added_ids else _UNUSED_SCORE
        for i in range(len(table.tokens))
    ]
    charsmap, collapse = _normalizer(body, file)
    return Vocabulary(
        model="t5",
        pre="default",
        tokens=table.tokens,
        types=types,
        scores=scores,
        adds={"bos": False, "eos": False, **adds},
        space_prefix=space_prefix(body, settings),
        collapse_spaces=collapse,
        charsmap=charsmap,
        segments=_segments(config),
        warnings=tuple(warnings),
    )


def _segments(config: Mapping[str, Any]) -> int | None:
    size = config.get("type_vocab_size")
    return size if isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 1 << 16 else None


def _normalizer(body: Mapping[str, Any], file: Path) -> tuple[bytes, bool]:
    """Return (charsmap, whether spaces are collapsed). Raises InputError."""
    charsmap, collapse = b"", False
    for node in nodes(body.get("normalizer")):
        if node.get("type") == "Precompiled":
            try:
                charsmap = b64decode(
                    typed(node.get("precompiled_charsmap"), str, "precompiled_charsmap", file=file), validate=True
                )
            except binascii.Error as e:
                raise InputError(f"precompiled_charsmap is not base64: {e}", file=file) from None
        pattern = node.get("pattern")
        if (
            node.get("type") == "Replace"
            and isinstance(pattern, Mapping)
            and pattern.get("Regex") in (_SPACES, r"\s{2,}")
        ):
            collapse = True
    return charsmap, collapse or any(n.get("type") == "WhitespaceSplit" for n in nodes(body.get("pre_tokenizer")))


def from_model(
    file: Path,
    model: sentencepiece.Model,
    adds: Mapping[str, bool],
    config: Mapping[str, Any],
    more: Mapping[str, Any],
    rows: int | None,
) -> Vocabulary:
    """Return the vocabulary of a unigram SentencePiece file. more: added_tokens.json. Raises InputError."""
    pieces = list(model.pieces)
    added = [Added(strict_json.integer(i, "id of an added token", file=file), text, False) for text, i in more.items()]
    if file.name == _FAIRSEQ[0]:
        pieces = [(text, 0.0, UNKNOWN if text == "<unk>" else CONTROL) for text in _FAIRSEQ[1]] + pieces[3:]
        added.append(Added(len(pieces), "<mask>", True))
    table = lay_out([(text, i) for i, (text, _, _) in enumerate(pieces)], added, rows, file)
    types, scores = list(table.types), [_UNUSED_SCORE] * len(table.tokens)
    for a in added:
        if a.id < len(scores):
            scores[a.id] = -1000.0 if not a.special else 0.0
    for i, (_, score, kind) in enumerate(pieces[: len(types)]):
        types[i], scores[i] = kind, score
    return Vocabulary(
        model="t5",
        pre="default",
        tokens=table.tokens,
        types=types,
        scores=scores,
        adds={"bos": file.name == _FAIRSEQ[0], "eos": True, **adds},
        space_prefix=model.add_prefix,
        collapse_spaces=model.collapse_spaces,
        charsmap=model.charsmap,
        segments=_segments(config),
        warnings=tuple(table.warnings),
    )


# ---------------------------------------------------------------- GGUF -> tokenizer.json: stages and model


def to_json(vocabulary: Vocabulary, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (stages, model) of tokenizer.json; the model's `vocab` is a list by id.

    A character without a piece costs 10 more than the worst piece: unused ones, which would lower that, get the worst
    normal score.
    """
    steps: list[dict[str, Any]] = []
    if vocabulary.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": b64encode(vocabulary.charsmap).decode()})
    if vocabulary.collapse_spaces:
        steps += [
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "Replace", "pattern": {"Regex": _SPACES}, "content": " "},
        ]
    # llama.cpp adds a space before every word if it collapses spaces, regardless of add_space_prefix.
    before = vocabulary.space_prefix or vocabulary.collapse_spaces
    spaces = {
        "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always" if before else "never", "split": False,
    }  # fmt: skip
    stages = {
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": spaces,
        "post_processor": None,
        "decoder": spaces,
    }
    both = list(zip(vocabulary.scores, vocabulary.types, strict=True))
    worst = min((score for score, kind in both if kind == NORMAL), default=0.0)
    scores = [max(score, worst) if kind in (UNUSED, CONTROL, UNKNOWN) else score for score, kind in both]
    vocab = [[name, score] for name, score in zip(names, scores, strict=False)]
    return stages, {"unk_id": vocabulary.special.get("unk"), "byte_fallback": False, "vocab": vocab}
