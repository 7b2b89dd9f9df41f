"""BPE of tokenizer.json -> the words of GGUF, and back: merges over bytes (`gpt2`) or over text (`gemma4`).

Bytes are written with an alphabet of 256 printable characters (U+0120 is the space), so that merges are text. Merges over text have ▁
for spaces and the tokens <0x00> to <0xFF> for what the vocabulary lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyquant.tokenizers import pretokenizers, recognition
from polyquant.tokenizers.families import Family
from polyquant.tokenizers.token_table import BYTE_PIECE, Table
from polyquant.tokenizers.vocabulary import BYTE, NORMAL, USER, Vocabulary

__all__ = ["byte_level", "over_text", "say_byte_level", "say_over_text"]

_TEXT_SCORE = -1000.0
"""What llama.cpp's converter gives to each token of a model whose merges have ranks; nothing reads it."""


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
    """A byte-level BPE. pre: a name of llama.cpp's instead of the one that cuts alike. Raises UnsupportedError where none does."""
    warnings = list(table.warnings)
    asked = bool(body["model"].get("ignore_merges"))
    made = {a + b for a, b in merges}
    normal = (t for t, kind in zip(table.tokens, table.types, strict=True) if kind == NORMAL and len(t) > 1)
    whole = all(t in made for t in normal)  # then a whole word is found by merging as well
    if pre is not None:
        name, kind = pre, recognition.named(pre, file=file)
    else:
        node = body.get("pre_tokenizer")
        found = recognition.recognise(node, ignore_merges=asked, whole=whole, prefer=family.pre, file=file)
        if found is None:
            raise recognition.unknown(node, file)
        name, kind = found
    if kind.ignore_merges != asked and not whole:
        does = "takes words of the vocabulary whole" if kind.ignore_merges else "merges every word"
        warnings.append(
            f"with pre-tokenizer '{name}' llama.cpp {does}, which tokenizer.json does not: some words may differ"
        )
    return Vocabulary(
        model="gpt2",
        pre=name,
        tokens=table.tokens,
        types=table.types,
        merges=_joined(merges),
        adds={"bos": False, **adds} if kind.add_bos else adds,  # else llama.cpp would put one in front
        warnings=tuple(warnings),
    )


def over_text(table: Table, merges: Sequence[tuple[str, str]], adds: Mapping[str, bool], family: Family) -> Vocabulary:
    """A BPE that merges text and keeps the order of its merges."""
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
    """ "left right": a space cannot stand inside, U+0120 is the byte-level alphabet's."""
    return [f"{a.replace(' ', 'Ġ')} {b.replace(' ', 'Ġ')}" for a, b in merges]


# ---------------------------------------------------------------- back: stages and model of tokenizer.json


def say_byte_level(
    vocabulary: Vocabulary, ids: Mapping[str, int], warnings: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(stages, model) of tokenizer.json for merges over bytes."""
    kind = pretokenizers.kind_of(vocabulary.pre)
    if kind is None:
        warnings.append(f"pre-tokenizer '{vocabulary.pre}' is unknown: words are cut as GPT-2 does")
        kind = pretokenizers.KINDS[0]
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    stages = {
        "normalizer": {"type": "NFC"} if kind.nfc else None,
        "pre_tokenizer": pretokenizers.to_json(kind),
        "post_processor": plain | {"trim_offsets": False},
        "decoder": plain,
    }
    return stages, {"ignore_merges": kind.ignore_merges, "merges": _known(vocabulary, ids, warnings)}


def say_over_text(
    vocabulary: Vocabulary, ids: Mapping[str, int], warnings: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(stages, model) of tokenizer.json for merges over text: cut at line ends only."""
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
        "merges": _known(vocabulary, ids, warnings),
    }
    return stages, model


def _known(vocabulary: Vocabulary, ids: Mapping[str, int], warnings: list[str]) -> list[str]:
    """Merges whose pieces are tokens."""
    merges = []
    for merge in vocabulary.merges:
        cut = merge.find(" ", 1)  # the first character may itself be a space
        left, right = merge[:cut], merge[cut + 1 :]
        if cut > 0 and left in ids and right in ids and left + right in ids:
            merges.append(merge)
    if lost := len(vocabulary.merges) - len(merges):
        warnings.append(f"{lost} merges speak of pieces that are no tokens and are left out")
    return merges
