"""A tokenizer in GGUF's form, and the metadata keys `tokenizer.*`.

| key tokenizer.ggml. | field |
|---|---|
| model | model: a row of the table below |
| pre | pre: word splitting (pretokenizers.py) |
| tokens, token_type, scores, merges | lists by id (merges: by rank, "left right") |
| bos_token_id, ... | special |
| add_bos_token, add_eos_token, add_sep_token | adds; llama.cpp's default where absent |
| token_type_count | segments: rows of the token-type embedding |
| normalizer.lowercase, normalizer.strip_accents | lowercase, strip_accents; absent: true, and as lowercase |
| add_space_prefix, remove_extra_whitespaces, precompiled_charsmap | space_prefix, collapse_spaces, charsmap |
| (tokenizer.chat_template, .chat_template.NAME) | templates: never rendered here |

| model | description | scores | merges |
|---|---|---|---|
| gpt2 | byte-level BPE | | yes |
| llama | SentencePiece BPE: pieces merge by score, byte fallback | yes | |
| gemma4 | BPE over text with ▁ for spaces, byte fallback | yes | yes |
| bert | WordPiece: ▁ marks the first piece of a word (tokenizer.json marks the others, with ##) | | |
| t5 | SentencePiece unigram: the split with the highest total score | yes | |
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
from polyquant.types import Kind, Meta

__all__ = ["BYTE", "CONTROL", "MODELS", "NORMAL", "UNKNOWN", "UNUSED", "USER", "Vocabulary", "from_metadata"]

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

MODELS = ("gpt2", "llama", "gemma4", "bert", "t5")
_SCORED = ("llama", "gemma4", "t5")
_MERGED = ("gpt2", "gemma4")

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
_DEFAULT_IDS = {
    "llama": {"unk": 0, "bos": 1, "eos": 2},
    "bert": {"bos": 101, "unk": 100, "sep": 102, "pad": 0, "mask": 103},
    "t5": {"eos": 1, "unk": 2, "pad": 0},
}
"""The default ids of llama.cpp for missing keys."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """See the module's tables. scores, merges: empty for models without. Switches are None if not applicable or absent.

    prefix: ids before every input, instead of bos (ChatGLM); GGUF has no key for them. omits: keys that are not
    written.
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
    collapse_spaces: bool | None = None
    charsmap: bytes = b""
    segments: int | None = None
    lowercase: bool | None = None
    strip_accents: bool | None = None
    templates: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[int, ...] = ()
    omits: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()

    def metadata(self) -> dict[str, Meta]:
        """Return GGUF keys in the converter's order; only the chat template if there are no tokens."""
        out: dict[str, Meta] = {}
        if self.tokens:
            out = {"model": string(self.model)}
            if self.pre:
                out["pre"] = string(self.pre)
            out["tokens"] = strings(self.tokens)
            if self.scores:
                out["scores"] = f32s(self.scores)
            out["token_type"] = i32s(self.types)
            if self.segments is not None:
                out["token_type_count"] = u32(self.segments)
            if self.merges:
                out["merges"] = strings(self.merges)
            # llama.cpp has no key for cls: bos is used instead.
            out |= {_ID_KEYS[k]: u32(v) for k, v in self.special.items() if k != "cls"}
            out |= {f"add_{k}_token": boolean(v) for k, v in self.adds.items()}
            out |= {
                key: boolean(value)
                for key, value in self._switches().items()
                if value is not None and key not in self.omits
            }
            if self.charsmap:
                out["precompiled_charsmap"] = Meta(Kind.ARRAY, list(self.charsmap), Kind.UINT8)
        return {f"tokenizer.ggml.{k}": v for k, v in out.items()} | self._template_keys()

    def _switches(self) -> dict[str, bool | None]:
        return {
            "add_space_prefix": self.space_prefix,
            "remove_extra_whitespaces": self.collapse_spaces,
            "normalizer.lowercase": self.lowercase,
            "normalizer.strip_accents": self.strip_accents,
        }

    def _template_keys(self) -> dict[str, Meta]:
        allowed = letters.ascii_letters + letters.digits
        named = {"".join(c if c in allowed else "_" for c in n): t for n, t in self.templates.items() if n != "default"}
        out = {f"tokenizer.chat_template.{name}": string(text) for name, text in sorted(named.items())}
        if named:
            out["tokenizer.chat_templates"] = strings(sorted(named))
        if "default" in self.templates:
            out["tokenizer.chat_template"] = string(self.templates["default"])
        return out

    @property
    def raw(self) -> bool:
        """True if merges apply to text, not to bytes."""
        kind = pretokenizers.kind_of(self.pre)
        return self.model == "gemma4" or (self.model == "gpt2" and kind is not None and kind.raw)

    def added(self, kind: str) -> bool:
        """True if `bos` or `eos` is added around the input, including llama.cpp's defaults."""
        known = pretokenizers.kind_of("gemma4" if self.model == "gemma4" else self.pre)
        implied = self.model == "llama" or (self.model in _MERGED and known is not None and known.add_bos)
        if kind == "bos" and (self.model == "bert" or (self.raw and implied)):
            return True  # regardless of the file
        if kind in self.adds:
            return self.adds[kind]
        return implied if kind == "bos" else kind == "eos" and self.model == "t5"

    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids before and after every input."""
        special = self.special
        before = (special["bos"],) if self.added("bos") and "bos" in special else ()
        after = "sep" if self.model == "bert" else "eos" if self.added("eos") else ""
        return self.prefix or before, (special[after],) if after in special else ()


def from_metadata(metadata: Mapping[str, Any], *, file: object = None) -> Vocabulary:
    """Return the tokenizer of a GGUF file; without tokens if it cannot be converted. Raises InputError."""

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
    if model not in MODELS or not tokens:
        why = (
            "there is no tokenizer in the file"
            if not model
            else f"tokenizer model '{model}' cannot be expressed in tokenizer.json"
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
    if model in ("llama", "t5") and (scores is None or not all(map(math.isfinite, scores))):
        raise InputError(f"a {model} tokenizer needs a finite score for every token", file=file)
    special = {k: v for k in _ID_KEYS if (v := get(_ID_KEYS[k], int)) is not None and 0 <= v < n}
    if model == "bert" and "bos" not in special and "cls" in special:
        special["bos"] = special["cls"]  # as in files from before 2025
    special = {k: v for k, v in _DEFAULT_IDS.get(model, {}).items() if v < n} | special
    prefix, collapse = get("add_space_prefix", bool), get("remove_extra_whitespaces", bool)
    return Vocabulary(
        model=model,
        pre=get("pre", str) or ("gemma4" if model == "gemma4" else "default"),
        tokens=tokens,
        types=types if types is not None else [NORMAL] * n,
        scores=scores if model in _SCORED and scores is not None else (),
        merges=listed("merges", str) or () if model in _MERGED else (),
        special=special,
        adds={k: v for k in ("bos", "eos", "sep") if (v := get(f"add_{k}_token", bool)) is not None},
        space_prefix=(prefix is None or prefix) if model == "llama" else prefix,
        collapse_spaces=collapse,
        charsmap=_charsmap(listed("precompiled_charsmap", int), file) if model == "t5" else b"",
        segments=get("token_type_count", int),
        lowercase=get("normalizer.lowercase", bool),
        strip_accents=get("normalizer.strip_accents", bool),
        templates=templates,
    )


def _charsmap(values: list[int] | None, file: object) -> bytes:
    """Return SentencePiece's replacement table, whose first four bytes are the size of its trie. Raises InputError."""
    if values is None:
        return b""
    raw = bytes(v & 255 for v in values)
    if len(raw) < 4 or int.from_bytes(raw[:4], "little") + 4 >= len(raw):
        raise InputError("tokenizer.ggml.precompiled_charsmap is truncated", file=file, found=f"{len(raw)} bytes")
    return raw


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template."
    templates = {"default": metadata.get("tokenizer.chat_template")}
    templates |= {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    return {k: v for k, v in templates.items() if isinstance(v, str)}
