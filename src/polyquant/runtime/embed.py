"""Embeddings: the states of the tokens of an input text, pooled as the model specifies (architectures/pooling.py),
optionally normalized.

    mean   of the states of all tokens         cls   that of the first token         last   that of the last token

Reimers and Gurevych 2019. Inputs are processed one at a time, so there is no padding that could cost time or change a
vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from polyquant.architectures.pooling import KINDS, Kind, Pooling
from polyquant.errors import InputError, UnsupportedError
from polyquant.tokenizers.tokenizer import Tokenizer
from polyquant.types import F32, Checkpoint

__all__ = ["Text", "Texts", "embed", "pooled", "resolved_pooling", "text_ids", "unit", "vectors"]

Text: TypeAlias = str | Sequence[int]
"""A string, or its token ids."""
Texts: TypeAlias = Text | Sequence[Text]
_LONGEST = 256  # characters per token, on average: longer inputs are rejected without tokenizing
_TINY = 1e-12  # lower bound of the divisor, as in torch


class Embedder(Protocol):
    """The members of a model that embedding uses (runtime.model.Model)."""

    @property
    def checkpoint(self) -> Checkpoint:
        """Its checkpoint."""

    @property
    def context(self) -> int:
        """The maximum number of tokens."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises UnsupportedError."""

    @property
    def pooling(self) -> Pooling | None:
        """The pooling that its files specify."""

    def states(self, tokens: Sequence[int]) -> F32:
        """Return the final states, float32 [T, hidden]."""


def embed(model: Embedder, texts: Texts, *, pooling: Kind | None = None, normalize: bool | None = None) -> F32:
    """Return the embeddings float32 [n, hidden], one row per input. pooling, normalize: None for the model's setting.

    Raises InputError for inputs that are empty or exceed the context, UnsupportedError if the model does not specify
    its pooling.
    """
    how = resolved_pooling(model, pooling, normalize)
    return np.stack(list(vectors(model, [text_ids(model, text) for text in listed(texts)], how)))


def resolved_pooling(model: Embedder, pooling: Kind | None = None, normalize: bool | None = None) -> Pooling:
    """Return the pooling that the files specify, with these overrides. Raises InputError, UnsupportedError."""
    if pooling is not None and pooling not in KINDS:
        raise InputError("unknown pooling", expected=" or ".join(KINDS), found=pooling)
    declared = None if pooling is not None and normalize is not None else model.pooling
    if pooling is None and declared is None:
        raise UnsupportedError(
            "the model does not specify how token vectors are pooled",
            file=model.checkpoint.path,
            hint=f"choose one: --pooling {', '.join(KINDS)}",
        )
    kind = pooling if pooling is not None else declared.kind if declared is not None else "mean"
    return Pooling(kind, normalize if normalize is not None else declared is not None and declared.normalize)


def vectors(model: Embedder, ids: Sequence[Sequence[int]], how: Pooling) -> Iterator[F32]:
    """Yield the vector [hidden] of each list of token ids. Raises InputError."""
    for tokens in ids:
        vector = pooled(model.states(tokens), how.kind)
        if not np.isfinite(vector).all():
            raise InputError(
                "the model's output is not a number",
                file=model.checkpoint.path,
                hint="its weights hold NaN or infinity: polyquant validate",
            )
        yield unit(vector) if how.normalize else vector


def pooled(states: F32, kind: Kind) -> F32:
    """Pool states: [T, hidden] -> [hidden]."""
    if kind == "mean":
        return np.asarray(states.mean(0, dtype=np.float64), np.float32)
    return np.array(states[0 if kind == "cls" else -1], np.float32)


def unit(vector: F32) -> F32:
    """Return the vector [n] scaled to unit length."""
    wide = vector.astype(np.float64)
    return np.asarray(wide / max(float(np.sqrt(wide @ wide)), _TINY), np.float32)


def listed(texts: Texts) -> list[Text]:
    """Return a list of inputs from a single one or several. Raises InputError for none."""
    items: list[Any] = [texts] if isinstance(texts, str) else list(texts)
    if items and all(isinstance(t, int | np.integer) and not isinstance(t, bool) for t in items):
        items = [items]
    if not items:
        raise InputError("there is no input text", expected="at least one")
    return items


def text_ids(model: Embedder, text: Text) -> list[int]:
    """Return the token ids of an input, with the tokenizer's special tokens.

    Raises InputError for an input that is empty or too long, UnsupportedError.
    """
    if isinstance(text, str) and len(text) > _LONGEST * model.context:
        raise _too_long(model, f"an input of {len(text)} characters")
    ids = model.tokenizer.encode(text) if isinstance(text, str) else _token_ids(text)
    if not ids:
        raise InputError("an input is empty", expected="a string or token ids")
    if len(ids) > model.context:
        raise _too_long(model, f"{len(ids)} tokens")
    return ids


def _token_ids(ids: Any) -> list[int]:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InputError("an input must be a string or a list of token ids", found=f"{array.dtype} {list(array.shape)}")
    return [int(i) for i in array]


def _too_long(model: Embedder, found: str) -> InputError:
    return InputError(
        "an input is longer than the model's context", expected=f"at most {model.context} tokens", found=found
    )
