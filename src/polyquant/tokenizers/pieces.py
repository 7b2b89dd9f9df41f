"""SentencePiece BPE: pieces with scores (model `llama`), from tokenizer.json, tokenizer.model, or both.

Spaces are ▁, bytes are the fallback. The scores are those of `tokenizer.model` if it agrees with tokenizer.json,
otherwise minus the rank of the merge that makes the piece. In the other direction, merges are made from the vocabulary:
every split of a piece into two pieces, best piece first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyquant.storage import strict_json
from polyquant.tokenizers import chatglm as chatglm_tokens
from polyquant.tokenizers import sentencepiece
from polyquant.tokenizers.families import Family
from polyquant.tokenizers.special_tokens import listed, nodes
from polyquant.tokenizers.token_table import BYTE_PIECE, Added, Table, lay_out, looks_special
from polyquant.tokenizers.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER, Vocabulary

__all__ = ["from_json", "from_model", "space_prefix", "to_json"]

_ADDED_SCORE, _UNUSED_SCORE = -1000.0, -10000.0
_MAX_PIECE = 256  # characters; longer pieces are never merged, to bound the cost of malicious files


@dataclass(slots=True)
class _Pieces:
    """Types and scores by id, during construction."""

    tokens: list[str]
    types: list[int]
    scores: list[float]


def from_json(
    body: Mapping[str, Any],
    table: Table,
    merges: Sequence[tuple[str, str]],
    adds: Mapping[str, bool],
    family: Family,
    settings: Mapping[str, Any],
    model_file: Path | None,
) -> Vocabulary:
    """Return the vocabulary of a BPE with byte fallback. model_file: the tokenizer.model next to it."""
    types = [
        BYTE if t == NORMAL and BYTE_PIECE.fullmatch(x) else t for t, x in zip(table.types, table.tokens, strict=True)
    ]
    unknown = body["model"].get("unk_token")
    if isinstance(unknown, str) and unknown in table.ids and not family.added_first:
        types[table.ids[unknown]] = UNKNOWN
    warnings = list(table.warnings)
    draft = _Pieces(list(table.tokens), types, [])
    model = sentencepiece.read(model_file) if model_file is not None else None
    if model is None or not _score_by_model(draft, model, family):
        normal = {x for x, t in zip(table.tokens, types, strict=True) if t == NORMAL}
        known = set(merges)
        if not all(pair in known for piece in normal for pair in _halves(piece, normal)):
            warnings.append(
                "some merges allowed by the vocabulary are missing: llama.cpp merges by score only and may differ"
            )
        rank: dict[str, int] = {}
        for i, (a, b) in enumerate(merges):
            rank.setdefault(a + b, i)
        draft.scores = _scores(table.tokens, types, rank)
    else:
        _apply_decoder(draft, settings)
    if not str(settings.get("tokenizer_class", "")).startswith("LlamaTokenizer"):
        adds = {"bos": False, **adds}  # that class adds one by default, as llama.cpp does
    prefix, omits, doubts = _prefix(space_prefix(body, settings), settings, family)
    return Vocabulary(
        model="llama", pre="default", tokens=draft.tokens, types=draft.types, scores=draft.scores, adds=adds,
        space_prefix=prefix, omits=omits, warnings=(*warnings, *doubts),
            )  # fmt: skip


def _halves(piece: str, known: set[str]) -> Iterable[tuple[str, str]]:
    """Yield every split of a piece into two known ones."""
    for i in range(1, min(len(piece), _MAX_PIECE)):
        if piece[:i] in known and piece[i:] in known:
            yield piece[:i], piece[i:]


def _scores(tokens: list[str], types: list[int], rank: Mapping[str, int]) -> list[float]:
    """Return scores that prefer earlier merges, as in SentencePiece: minus the rank of the first merge that makes the
    piece."""
    last = float(len(rank))
    fixed = {UNUSED: _UNUSED_SCORE - last, CONTROL: _ADDED_SCORE, USER: _ADDED_SCORE, BYTE: 0.0, UNKNOWN: 0.0}
    return [fixed.get(t, -float(rank.get(x, last))) for x, t in zip(tokens, types, strict=True)]


def _score_by_model(draft: _Pieces, model: sentencepiece.Model, family: Family) -> bool:
    """Use the scores of tokenizer.model if it has the same pieces under the same ids: fine-tuned folders often keep a
    stale one."""
    pieces = model.pieces
    scores = _scores(draft.tokens, draft.types, {})
    for i, (token, kind) in enumerate(zip(draft.tokens, draft.types, strict=True)):
        same = i < len(pieces) and pieces[i][0] == token
        if kind in (NORMAL, BYTE, UNKNOWN) and not same:
            return False
        if same and (kind in (NORMAL, BYTE, UNKNOWN) or not family.added_first):
            scores[i] = pieces[i][1]
    draft.scores = scores
    return True


def _apply_decoder(draft: _Pieces, settings: Mapping[str, Any]) -> None:
    """Apply `added_tokens_decoder` of tokenizer_config.json, which overrides tokenizer.model."""
    for i, text, special in listed(settings):
        if i < len(draft.tokens):
            control = special or looks_special(text)
            draft.tokens[i] = text if control else text.replace("▁", " ")
            draft.types[i], draft.scores[i] = CONTROL if control else USER, _ADDED_SCORE


def space_prefix(body: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """True if a leading space is added to the start of the input."""
    if isinstance(declared := settings.get("add_prefix_space"), bool):
        return declared
    return any(
        n.get("type") == "Prepend"
        or (
            n.get("type") == "Metaspace"
            and (n.get("prepend_scheme") in ("always", "first") or n.get("add_prefix_space") is True)
        )
        for key in ("normalizer", "pre_tokenizer")
        for n in nodes(body.get(key))
    )


def _prefix(adds_space: bool, settings: Mapping[str, Any], family: Family) -> tuple[bool, frozenset[str], list[str]]:
    """Return (add_space_prefix, keys omitted from the metadata, warnings)."""
    if isinstance(family.space_prefix, bool):
        return family.space_prefix, frozenset(), []
    if isinstance(settings.get("add_prefix_space"), bool) or (family.space_prefix == "files" and not adds_space):
        return adds_space, frozenset(), []
    doubts = []
    if not adds_space:
        doubts.append(
            "add_space_prefix is omitted, as in llama.cpp's converter for this family: llama.cpp adds a leading space, "
            "the tokenizer of the folder does not"
        )
    return adds_space, frozenset({"add_space_prefix"}), doubts


# ---------------------------------------------------------------- tokenizer.model only


def from_model(
    file: Path,
    model: sentencepiece.Model,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    family: Family,
    *,
    more: Mapping[str, Any],
    rows: int | None,
) -> Vocabulary:
    """Return the vocabulary of a tokenizer.model, with added tokens of JSON files next to it (more: added_tokens.json),
    or of ChatGLM's code."""
    added = [Added(strict_json.integer(i, "id of an added token", file=file), text, False) for text, i in more.items()]
    added += [Added(i, text, special) for i, text, special in listed(settings) if i >= len(model.pieces)]
    items = [(text, i) for i, (text, _, _) in enumerate(model.pieces)]
    chatglm = config.get("model_type") == chatglm_tokens.MODEL_TYPE
    if chatglm:
        taken = {a.id for a in added}
        words = enumerate(chatglm_tokens.SPECIAL, start=len(items))
        added += [Added(i, text, text.startswith("[")) for i, text in words if i not in taken]
    size = rows if rows is not None else max([len(items), *(a.id + 1 for a in added)])
    table = lay_out(items, added, size, file)
    draft = _Pieces(list(table.tokens), list(table.types), _scores(table.tokens, table.types, {}))
    for i, (_, score, kind) in enumerate(model.pieces[:size]):
        draft.types[i], draft.scores[i] = kind, score
    _apply_decoder(draft, settings)
    adds = {k: v for k in ("bos", "eos") if isinstance(v := settings.get(f"add_{k}_token"), bool)}
    prefix: tuple[int, ...] = ()
    if chatglm:
        adds = {"bos": False, **adds}  # otherwise llama.cpp would add one
        # Ordinary letter sequences: if matched as tokens, they would split words of the text.
        draft.types = [
            UNUSED if text in chatglm_tokens.LETTERS else kind
            for text, kind in zip(draft.tokens, draft.types, strict=True)
        ]
        prefix = tuple(table.ids[text] for text in chatglm_tokens.PREFIX if text in table.ids)
    spaces, omits, doubts = _prefix(model.add_prefix, settings, family)
    return Vocabulary(
        model="llama", pre="default", tokens=draft.tokens, types=draft.types, scores=draft.scores, adds=adds,
        space_prefix=spaces, omits=omits, prefix=prefix, warnings=(*table.warnings, *doubts),
            )  # fmt: skip


# ---------------------------------------------------------------- GGUF -> tokenizer.json: stages and model


def to_json(vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (stages, model) of tokenizer.json."""
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    before = [{"type": "Prepend", "prepend": "▁"}] if vocabulary.space_prefix else []
    after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if vocabulary.space_prefix else []
    stages = {
        "normalizer": {"type": "Sequence", "normalizers": [*before, space]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *after]},
    }
    unknown = vocabulary.special.get("unk")
    model = {
        "unk_token": vocabulary.tokens[unknown] if unknown is not None else None,
        "fuse_unk": True,
        "byte_fallback": True,
        "merges": _merges(vocabulary.tokens, vocabulary.types, vocabulary.scores),
    }
    return stages, model


def _merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[str]:
    """Return every split of a normal piece into two normal pieces, by descending score of the whole."""
    ids = {x: i for i, (x, t) in enumerate(zip(tokens, types, strict=True)) if t == NORMAL and " " not in x}
    out: list[str] = []
    for piece in sorted(ids, key=lambda x: (-scores[ids[x]], ids[x])):
        if len(piece) <= _MAX_PIECE:
            cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
            pairs = sorted((ids[a], ids[b], a, b) for a, b in cuts if a in ids and b in ids)
            out += [f"{a} {b}" for _, _, a, b in pairs]
    return out
