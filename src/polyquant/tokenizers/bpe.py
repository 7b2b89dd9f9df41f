"""BPE between tokenizer.json and GGUF: merges over bytes (`gpt2`) or over text (`gemma4`).

Bytes are written in an alphabet of 256 printable characters (U+0120 is the space), so merges are strings. Merges over
text have ▁ for spaces and the tokens <0x00> to <0xFF> for characters missing from the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyquant.tokenizers import pretokenizers, recognition
from polyquant.tokenizers.families import Family
from polyquant.tokenizers.token_table import BYTE_PIECE, Table
from polyquant.tokenizers.vocabulary import BYTE, NORMAL, USER, Vocabulary

__all__ = ["byte_level", "byte_level_json", "over_text", "over_text_json"]

_TEXT_SCORE = -1000.0
"""The score that llama.cpp's converter writes for tokens of models with ranked merges; readers ignore it."""


def byte_level(
    body: Mapping[str, Any],
    table: Table,
    merges: Sequence[tuple[str, str]],
    adds: Mapping[str, bool],
    family: Family,
    *,
    pre: str | None,
    file: Path,
) -> Vocabulary:
    """Return the vocabulary of a byte-level BPE.

    pre: a pre-tokenizer name of llama.cpp, instead of the equivalent one. Raises UnsupportedError if there is none.
    """
    warnings = list(table.warnings)
    ignore_merges = bool(body["model"].get("ignore_merges"))
    merged = {a + b for a, b in merges}
    normal = (t for t, kind in zip(table.tokens, table.types, strict=True) if kind == NORMAL and len(t) > 1)
    whole = all(t in merged for t in normal)  # then merging finds whole words as well
    if pre is not None:
        name, kind = pre, recognition.named(pre, file=file)
    else:
        node = body.get("pre_tokenizer")
        match = recognition.recognise(node, ignore_merges=ignore_merges, whole=whole, prefer=family.pre, file=file)
        if match is None:
            raise recognition.unknown(node, file)
        name, kind = match
    if kind.ignore_merges != ignore_merges and not whole:
        does = "keeps words of the vocabulary whole" if kind.ignore_merges else "merges every word"
        warnings.append(f"with pre-tokenizer '{name}' llama.cpp {does}, unlike tokenizer.json: some words may differ")
    return Vocabulary(
        model="gpt2",
        pre=name,
        tokens=table.tokens,
        types=table.types,
        merges=_joined(merges),
        adds={"bos": False, **adds} if kind.add_bos else adds,  # otherwise llama.cpp would add one
        warnings=tuple(warnings),
    )


def over_text(table: Table, merges: Sequence[tuple[str, str]], adds: Mapping[str, bool], family: Family) -> Vocabulary:
    """Return the vocabulary of a BPE that merges text in the order of its merges."""
    types = [
        BYTE if t == NORMAL and BYTE_PIECE.fullmatch(x) else USER if x in family.visible else t
        for x, t in zip(table.tokens, table.types, strict=True)
    ]
    return Vocabulary(
        model="gemma4",
        tokens=table.tokens,
        types=types,
        scores=[_TEXT_SCORE] * len(types),
        merges=_joined(merges),
        adds=adds,
        space_prefix=family.space_prefix if isinstance(family.space_prefix, bool) else False,
        warnings=tuple(table.warnings),
    )


def _joined(merges: Sequence[tuple[str, str]]) -> list[str]:
    """Return merges as "left right"; spaces in pieces become U+0120, as in the byte-level alphabet."""
    return [f"{a.replace(' ', 'Ġ')} {b.replace(' ', 'Ġ')}" for a, b in merges]


# ---------------------------------------------------------------- GGUF -> tokenizer.json: stages and model


def byte_level_json(
    vocabulary: Vocabulary, ids: Mapping[str, int], warnings: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (stages, model) of tokenizer.json for merges over bytes."""
    kind = pretokenizers.kind_of(vocabulary.pre)
    if kind is None:
        warnings.append(f"pre-tokenizer '{vocabulary.pre}' is unknown: words are split as in GPT-2")
        kind = pretokenizers.KINDS[0]
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    stages = {
        "normalizer": {"type": "NFC"} if kind.nfc else None,
        "pre_tokenizer": pretokenizers.to_json(kind),
        "post_processor": plain | {"trim_offsets": False},
        "decoder": plain,
    }
    return stages, {"ignore_merges": kind.ignore_merges, "merges": _valid_merges(vocabulary, ids, warnings)}


def over_text_json(
    vocabulary: Vocabulary, ids: Mapping[str, int], warnings: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (stages, model) of tokenizer.json for merges over text, which is split at line ends only."""
    kind = pretokenizers.kind_of("gemma4" if vocabulary.model == "gemma4" else vocabulary.pre)
    assert kind is not None
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    stages = {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": pretokenizers.to_json(kind),
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}]},
    }
    unknown = vocabulary.special.get("unk")
    model = {
        "unk_token": vocabulary.tokens[unknown] if unknown is not None else None,
        "fuse_unk": True,
        "byte_fallback": True,
        "merges": _valid_merges(vocabulary, ids, warnings),
    }
    return stages, model


def _valid_merges(vocabulary: Vocabulary, ids: Mapping[str, int], warnings: list[str]) -> list[str]:
    """Return the merges whose pieces are tokens."""
    merges = []
    for merge in vocabulary.merges:
        cut = merge.find(" ", 1)  # the first character may be a space itself
        left, right = merge[:cut], merge[cut + 1 :]
        if cut > 0 and left in ids and right in ids and left + right in ids:
            merges.append(merge)
    if lost := len(vocabulary.merges) - len(merges):
        warnings.append(f"{lost} merges refer to pieces that are not tokens and are dropped")
    return merges
