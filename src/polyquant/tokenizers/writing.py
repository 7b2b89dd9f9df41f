"""Write a GGUF vocabulary as tokenizer.json and the files next to it.

All tokens go into the model's vocabulary, including control tokens: readers renumber added tokens after the vocabulary,
and a hole would shift them. Stages and model of each kind come from its module: bpe.py, pieces.py, wordpiece.py,
unigram.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from polyquant.tokenizers import bpe, pieces, unigram, wordpiece
from polyquant.tokenizers.vocabulary import CONTROL, UNKNOWN, UNUSED, USER, Vocabulary

__all__ = ["document", "files", "generation_config", "special_ids"]

_CLASSES = {"bert": "BertTokenizerFast"}
_BPE = {
    "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
    "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
}  # fmt: skip


def special_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the entries of config.json."""
    return {f"{k}_token_id": vocabulary.special[k] for k in ("bos", "eos", "pad") if k in vocabulary.special}


def generation_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return generation_config.json: the end of a turn also ends generation."""
    out: dict[str, Any] = {"_from_model_config": True, **special_ids(vocabulary)}
    ends = [vocabulary.special[k] for k in ("eos", "eot", "eom") if k in vocabulary.special]
    if len(set(ends)) > 1:
        out["eos_token_id"] = list(dict.fromkeys(ends))
    return out


def files(vocabulary: Vocabulary) -> tuple[dict[str, bytes], list[str]]:
    """Return ({file name: content}, warnings); no tokenizer.json without tokens."""
    warnings: list[str] = []
    out = {}
    if vocabulary.tokens:
        text = vocabulary.tokens
        settings: dict[str, Any] = {
            "tokenizer_class": _CLASSES.get(vocabulary.model, "PreTrainedTokenizerFast"),
            "clean_up_tokenization_spaces": False,
            "add_bos_token": vocabulary.added("bos"),
            "add_eos_token": vocabulary.added("eos"),
        }
        if vocabulary.model == "bert":
            settings |= {"do_lower_case": vocabulary.lowercase is not False, "strip_accents": vocabulary.strip_accents}
        settings |= {f"{k}_token": text[i] for k, i in vocabulary.special.items() if k not in ("eot", "eom")}
        if vocabulary.model == "bert" and "bos" in vocabulary.special:
            settings["cls_token"] = text[vocabulary.special["bos"]]
        # Without indentation: it would cost seconds and a third more bytes for a vocabulary of 150,000.
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
    """Return the content of tokenizer.json; add information that cannot be expressed to the warnings."""
    types = vocabulary.types
    tokens = wordpiece.to_json_tokens(vocabulary) if vocabulary.model == "bert" else vocabulary.tokens
    size = len(tokens)
    while size and types[size - 1] == UNUSED and vocabulary.tokens[size - 1].endswith(f"[PAD{size - 1}]"):
        size -= 1  # rows of the embedding without a token
    names: list[str] = list(tokens[:size])
    ids = dict(zip(names, range(size), strict=True))
    if repeated := size - len(ids):
        ids = {}
        for i, token in enumerate(tokens[:size]):
            names[i] = f"[PAD{i}] {token}" if token in ids else token
            ids[names[i]] = i
        warnings.append(f"{repeated} tokens duplicate the text of another one and are renamed")
    added = [
        {"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": types[i] != USER}
        for i in range(size) if types[i] in (CONTROL, USER, UNKNOWN) and tokens[i]
    ]  # fmt: skip
    stages, model = _stages(vocabulary, ids, names, warnings)
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return head | stages | {"post_processor": _post_processor(vocabulary) or stages["post_processor"], "model": model}


def _stages(
    vocabulary: Vocabulary, ids: Mapping[str, int], names: Sequence[str], warnings: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (stages, model) of a vocabulary whose tokens are called `names`."""
    if vocabulary.model == "bert":
        stages, model = wordpiece.to_json(vocabulary)
        return stages, {"type": "WordPiece", **model, "vocab": ids}
    if vocabulary.model == "t5":
        stages, model = unigram.to_json(vocabulary, names)
        return stages, {"type": "Unigram", **model}
    if vocabulary.raw:
        stages, model = bpe.over_text_json(vocabulary, ids, warnings)
    elif vocabulary.model == "gpt2":
        stages, model = bpe.byte_level_json(vocabulary, ids, warnings)
    else:
        stages, model = pieces.to_json(vocabulary)
    merges = model.pop("merges")
    return stages, {**_BPE, **model, "vocab": ids, "merges": merges}


def _post_processor(vocabulary: Vocabulary) -> dict[str, Any] | None:
    """Return the post-processor that adds bos (or the prefix) and eos as the file specifies, None for none."""
    around = vocabulary.around()
    if not any(around):
        return None

    def special(side: int, kind_id: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": vocabulary.tokens[i], "type_id": kind_id}} for i in around[side]]

    def part(sequence: str, kind_id: int) -> list[dict[str, Any]]:
        return [*special(0, kind_id), {"Sequence": {"id": sequence, "type_id": kind_id}}, *special(1, kind_id)]

    # BERT's second sequence has no token before it.
    second = part("B", 1)[len(around[0]) :] if vocabulary.model == "bert" else part("B", 1)
    names = {
        vocabulary.tokens[i]: {"id": vocabulary.tokens[i], "ids": [i], "tokens": [vocabulary.tokens[i]]}
        for side in around
        for i in side
    }
    return {
        "type": "TemplateProcessing",
        "single": part("A", 0),
        "pair": part("A", 0) + second,
        "special_tokens": names,
    }
