"""A tokenizer as GGUF says it, and the metadata keys `tokenizer.*`.

| key | here |
|---|---|
| tokenizer.ggml.model | model: gpt2 (byte-level BPE) or llama (SentencePiece's BPE: pieces merge by score, bytes as fallback) |
| tokenizer.ggml.pre | pre: how text is cut into words (pretokenizers.py) |
| tokenizer.ggml.tokens, .token_type, .scores, .merges | lists by id (merges: by rank, "left right") |
| tokenizer.ggml.bos_token_id, ... | special |
| tokenizer.ggml.add_bos_token, .add_eos_token, .add_sep_token | adds; llama.cpp's default where absent |
| tokenizer.chat_template, .chat_template.NAME | templates: never rendered here |
"""

from __future__ import annotations

import math
import string as letters
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyquant.errors import InputError
from polyquant.gguf_values import boolean, f32s, i32s, string, strings, u32
from polyquant.tokenizers import pretokenizers
from polyquant.tokenizers.sentencepiece import MAX_TOKENS
from polyquant.types import Meta

__all__ = ["BYTE", "CONTROL", "NORMAL", "UNKNOWN", "UNUSED", "USER", "Vocabulary", "from_metadata"]

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_ID_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",  # llama.cpp's spelling
    "pad": "padding_token_id",
    "cls": "cls_token_id",
    "mask": "mask_token_id",
}
_SENTENCEPIECE_IDS = {"unk": 0, "bos": 1, "eos": 2}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """See the module's table. scores: empty for gpt2. merges: empty for llama. space_prefix: None where it does not apply.

    prefix: ids in front of every text, in place of bos (ChatGLM); GGUF has no key for them.
    """

    model: str = ""
    pre: str = ""
    tokens: Sequence[str] = ()
    types: Sequence[int] = ()
    scores: Sequence[float] = ()
    merges: Sequence[str] = ()
    special: Mapping[str, int] = field(default_factory=dict)
    adds: Mapping[str, bool] = field(default_factory=dict)
    space_prefix: bool | None = None
    templates: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()

    def metadata(self) -> dict[str, Meta]:
        """GGUF keys in the converter's order; empty without tokens, but for the chat template."""
        out: dict[str, Meta] = {}
        if self.tokens:
            out = {"model": string(self.model), "pre": string(self.pre), "tokens": strings(self.tokens)}
            if self.scores:
                out["scores"] = f32s(self.scores)
            out["token_type"] = i32s(self.types)
            if self.merges:
                out["merges"] = strings(self.merges)
            out |= {_ID_KEYS[k]: u32(v) for k, v in self.special.items()}
            out |= {f"add_{k}_token": boolean(v) for k, v in self.adds.items()}
            if self.space_prefix is not None:
                out["add_space_prefix"] = boolean(self.space_prefix)
        return {f"tokenizer.ggml.{k}": v for k, v in out.items()} | self._template_keys()

    def _template_keys(self) -> dict[str, Meta]:
        allowed = letters.ascii_letters + letters.digits
        named = {"".join(c if c in allowed else "_" for c in n): t for n, t in self.templates.items() if n != "default"}
        out = {f"tokenizer.chat_template.{name}": string(text) for name, text in sorted(named.items())}
        if named:
            out["tokenizer.chat_templates"] = strings(sorted(named))
        if "default" in self.templates:
            out["tokenizer.chat_template"] = string(self.templates["default"])
        return out

    def added(self, kind: str) -> bool:
        """Whether `bos` or `eos` is put around a text, llama.cpp's defaults included."""
        if kind in self.adds:
            return self.adds[kind]
        known = pretokenizers.kind_of(self.pre)
        return kind == "bos" and (self.model == "llama" or (known is not None and known.add_bos))


def from_metadata(metadata: Mapping[str, Any], *, file: object = None) -> Vocabulary:
    """The tokenizer of a GGUF file; one without tokens if there is none that we can say in other words. Raises InputError."""

    def get(key: str, kind: type | tuple[type, ...]) -> Any:
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise InputError(f"tokenizer.ggml.{key} has the wrong type", file=file, found=type(value).__name__)
        return value

    def listed(key: str, kind: type) -> list[Any] | None:
        value = get(key, Sequence)
        items = value if value is None or isinstance(value, str) else list(value)
        if items is not None and not (isinstance(items, list) and set(map(type, items)) <= {kind}):
            raise InputError(
                f"tokenizer.ggml.{key} has the wrong type", file=file, expected=f"an array of {kind.__name__}"
            )
        return items

    templates = _templates(metadata)
    model, tokens = get("model", str), get("tokens", Sequence)
    if model not in ("gpt2", "llama") or not tokens:
        why = (
            "there is no tokenizer in the file"
            if not model
            else f"tokenizer model '{model}' cannot be said in tokenizer.json"
        )
        return Vocabulary(templates=templates, warnings=(f"{why}: none is written",))
    n = len(tokens)
    if n > MAX_TOKENS:
        raise InputError("too many tokens", file=file, expected=f"at most {MAX_TOKENS}", found=n)
    tokens, types, scores = listed("tokens", str), listed("token_type", int), listed("scores", float)
    assert tokens is not None
    for key, values in (("token_type", types), ("scores", scores)):
        if values is not None and len(values) != n:
            raise InputError(f"tokenizer.ggml.{key} does not fit the tokens", file=file, expected=n, found=len(values))
    if model == "llama" and (scores is None or not all(map(math.isfinite, scores))):
        raise InputError("a llama tokenizer needs a finite score for every token", file=file)
    special = {k: v for k in _ID_KEYS if (v := get(_ID_KEYS[k], int)) is not None and 0 <= v < n}
    if model == "llama":
        special = {k: v for k, v in _SENTENCEPIECE_IDS.items() if v < n} | special
    adds = {k: v for k in ("bos", "eos", "sep") if (v := get(f"add_{k}_token", bool)) is not None}
    prefix = get("add_space_prefix", bool)
    return Vocabulary(
        model=model,
        pre=get("pre", str) or "default",
        tokens=tokens,
        types=types if types is not None else [NORMAL] * n,
        scores=scores if model == "llama" and scores is not None else (),
        merges=listed("merges", str) or () if model == "gpt2" else (),
        special=special,
        adds=adds,
        space_prefix=(prefix is None or prefix) if model == "llama" else None,
        templates=templates,
    )


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template."
    found = {"default": metadata.get("tokenizer.chat_template")}
    found |= {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    return {k: v for k, v in found.items() if isinstance(v, str)}
