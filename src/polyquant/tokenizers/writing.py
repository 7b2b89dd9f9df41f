"""The words of GGUF -> tokenizer.json and the files beside it.

Every token goes into the model's vocabulary, control tokens too: readers number added tokens anew, after the vocabulary, and a hole
would shift them. Merges of a model with scores are made from the vocabulary: each cut of a piece into two pieces, best piece first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from polyquant.tokenizers import pretokenizers
from polyquant.tokenizers.vocabulary import CONTROL, NORMAL, UNKNOWN, UNUSED, USER, Vocabulary

__all__ = ["document", "files", "generation_config", "special_ids"]

_MAX_PIECE = 256  # characters; longer pieces are never merged into, so that a hostile one costs nothing


def special_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """The entries of config.json."""
    return {f"{k}_token_id": vocabulary.special[k] for k in ("bos", "eos", "pad") if k in vocabulary.special}


def generation_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """generation_config.json: a turn's end ends the text as well."""
    out: dict[str, Any] = {"_from_model_config": True, **special_ids(vocabulary)}
    ends = [vocabulary.special[k] for k in ("eos", "eot", "eom") if k in vocabulary.special]
    if len(set(ends)) > 1:
        out["eos_token_id"] = list(dict.fromkeys(ends))
    return out


def files(vocabulary: Vocabulary) -> tuple[dict[str, bytes], list[str]]:
    """({file name: content}, warnings); no tokenizer.json without tokens."""
    warnings: list[str] = []
    out = {}
    if vocabulary.tokens:
        text = vocabulary.tokens
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": vocabulary.added("bos"),
            "add_eos_token": vocabulary.added("eos"),
        }
        settings |= {f"{k}_token": text[i] for k, i in vocabulary.special.items() if k not in ("eot", "eom")}
        # No indentation: a vocabulary of 150,000 would take seconds more and a third more bytes.
        out["tokenizer.json"] = json.dumps(document(vocabulary, warnings), ensure_ascii=False).encode()
        settings |= _template_entry(vocabulary.templates)
        out["tokenizer_config.json"] = (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    return out, warnings


def _template_entry(templates: Mapping[str, str]) -> dict[str, Any]:
    if not templates:
        return {}
    if set(templates) == {"default"}:
        return {"chat_template": templates["default"]}
    return {"chat_template": [{"name": n, "template": t} for n, t in sorted(templates.items())]}


def document(vocabulary: Vocabulary, warnings: list[str]) -> dict[str, Any]:
    """What tokenizer.json holds; what could not be said is added to the warnings."""
    tokens, types = vocabulary.tokens, vocabulary.types
    size = len(tokens)
    while size and types[size - 1] == UNUSED and tokens[size - 1] == f"[PAD{size - 1}]":
        size -= 1  # rows of the embedding that no token has
    ids = dict(zip(tokens[:size], range(size), strict=True))
    if repeated := size - len(ids):
        ids = {}
        for i, token in enumerate(tokens[:size]):
            ids[f"[PAD{i}] {token}" if token in ids else token] = i
        warnings.append(f"{repeated} tokens repeat the text of another and are renamed")
    added = [
        {"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": types[i] != USER}
        for i in range(size) if types[i] in (CONTROL, USER, UNKNOWN) and tokens[i]
    ]  # fmt: skip
    shape = _byte_level if vocabulary.model == "gpt2" else _pieces
    stages, merges, switches = shape(vocabulary, ids, warnings)
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, **switches, "vocab": ids, "merges": merges,
    }  # fmt: skip
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return head | stages | {"post_processor": _post_processor(vocabulary) or stages["post_processor"], "model": model}


_Shape = tuple[dict[str, Any], list[str], dict[str, Any]]


def _byte_level(vocabulary: Vocabulary, ids: Mapping[str, int], warnings: list[str]) -> _Shape:
    kind = pretokenizers.kind_of(vocabulary.pre)
    if kind is None:
        warnings.append(f"pre-tokenizer '{vocabulary.pre}' is unknown: words are cut as GPT-2 does")
        kind = pretokenizers.KINDS[0]
    merges = []
    for merge in vocabulary.merges:
        cut = merge.find(" ", 1)  # the first character may itself be a space
        left, right = merge[:cut], merge[cut + 1 :]
        if cut > 0 and left in ids and right in ids and left + right in ids:
            merges.append(merge)
    if lost := len(vocabulary.merges) - len(merges):
        warnings.append(f"{lost} merges speak of pieces that are no tokens and are left out")
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    stages = {
        "normalizer": {"type": "NFC"} if kind.nfc else None,
        "pre_tokenizer": pretokenizers.to_json(kind),
        "post_processor": plain | {"trim_offsets": False},
        "decoder": plain,
    }
    return stages, merges, {"ignore_merges": kind.ignore_merges}


def _pieces(vocabulary: Vocabulary, ids: Mapping[str, int], warnings: list[str]) -> _Shape:
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
    switches = {
        "unk_token": vocabulary.tokens[unknown] if unknown is not None else None,
        "fuse_unk": True,
        "byte_fallback": True,
    }
    return stages, _merges(vocabulary.tokens, vocabulary.types, vocabulary.scores), switches


def _merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[str]:
    """Every cut of a normal piece into two normal pieces, by falling score of the whole."""
    ids = {x: i for i, (x, t) in enumerate(zip(tokens, types, strict=True)) if t == NORMAL and " " not in x}
    out: list[str] = []
    for piece in sorted(ids, key=lambda x: (-scores[ids[x]], ids[x])):
        if len(piece) <= _MAX_PIECE:
            cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
            pairs = sorted((ids[a], ids[b], a, b) for a, b in cuts if a in ids and b in ids)
            out += [f"{a} {b}" for _, _, a, b in pairs]
    return out


def _post_processor(vocabulary: Vocabulary) -> dict[str, Any] | None:
    """Puts bos (or the prefix) and eos around a text, where the file asks for it."""
    special = vocabulary.special
    around: dict[str, tuple[int, ...]] = {
        k: (special[k],) if vocabulary.added(k) and k in special else () for k in ("bos", "eos")
    }
    around["bos"] = vocabulary.prefix or around["bos"]
    if not any(around.values()):
        return None

    def part(sequence: str, kind_id: int) -> list[dict[str, Any]]:
        before, after = (
            [{"SpecialToken": {"id": vocabulary.tokens[i], "type_id": kind_id}} for i in around[k]]
            for k in ("bos", "eos")
        )
        return [*before, {"Sequence": {"id": sequence, "type_id": kind_id}}, *after]

    names = {
        vocabulary.tokens[i]: {"id": vocabulary.tokens[i], "ids": [i], "tokens": [vocabulary.tokens[i]]}
        for ids in around.values()
        for i in ids
    }
    return {
        "type": "TemplateProcessing",
        "single": part("A", 0),
        "pair": part("A", 0) + part("B", 1),
        "special_tokens": names,
    }
