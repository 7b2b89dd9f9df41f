"""Texts -> vectors: the states of a text's tokens pooled as the model says (architectures/pooling.py), and brought to length 1 where it says so.

    mean   of the states of all tokens         cls   that of the first token         last   that of the last token

Reimers and Gurevych 2019. Texts go through the model one after the other, so that no padding is computed and none can change a vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from polyquant.architectures.pooling import KINDS, Kind, Pooling
from polyquant.errors import InputError, UnsupportedError
from polyquant.tokenizers.tokenizer import Tokenizer
from polyquant.types import F32, Checkpoint

__all__ = ["Text", "Texts", "embed", "pooled", "settled", "text_ids", "unit", "vectors"]

Text: TypeAlias = str | Sequence[int]
"""A text, or its token ids."""
Texts: TypeAlias = Text | Sequence[Text]
_LONGEST = 256  # characters of a token, on average: a longer text is refused unread
_TINY = 1e-12  # a vector shorter than this stays what it is but for this divisor, as in torch


class Embeds(Protocol):
    """What embedding needs of a model (runtime.model.Model)."""

    @property
    def checkpoint(self) -> Checkpoint:
        """Where it comes from."""

    @property
    def context(self) -> int:
        """Positions of a text."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Text <-> ids. Raises UnsupportedError."""

    @property
    def pooling(self) -> Pooling | None:
        """As its files say."""

    def states(self, tokens: Sequence[int]) -> F32:
        """float32 [T, hidden]."""


def embed(model: Embeds, texts: Texts, *, pooling: Kind | None = None, normalize: bool | None = None) -> F32:
    """float32 [n, hidden], a row for each text. pooling, normalize: None for what the model says.

    Raises InputError for texts that are empty or longer than the context, UnsupportedError for a model that does not say how it is pooled.
    """
    how = settled(model, pooling, normalize)
    return np.stack(list(vectors(model, [text_ids(model, text) for text in listed(texts)], how)))


def settled(model: Embeds, pooling: Kind | None = None, normalize: bool | None = None) -> Pooling:
    """How the model's vectors are made: as its files say, but for what is given. Raises InputError, UnsupportedError."""
    if pooling is not None and pooling not in KINDS:
        raise InputError("unknown pooling", expected=" or ".join(KINDS), found=pooling)
    said = None if pooling is not None and normalize is not None else model.pooling
    if pooling is None and said is None:
        raise UnsupportedError(
            "the model does not say how the vectors of its tokens become one",
            file=model.checkpoint.path,
            hint=f"choose a pooling: {', '.join(KINDS)}",
        )
    kind = pooling if pooling is not None else said.kind if said is not None else "mean"
    return Pooling(kind, normalize if normalize is not None else said is not None and said.normalize)


def vectors(model: Embeds, ids: Sequence[Sequence[int]], how: Pooling) -> Iterator[F32]:
    """The vector [hidden] of each text of token ids. Raises InputError."""
    for tokens in ids:
        found = pooled(model.states(tokens), how.kind)
        if not np.isfinite(found).all():
            raise InputError(
                "the model's output is not a number",
                file=model.checkpoint.path,
                hint="its weights hold NaN or infinity: polyquant validate",
            )
        yield unit(found) if how.normalize else found


def pooled(states: F32, kind: Kind) -> F32:
    """[T, hidden] -> [hidden]."""
    if kind == "mean":
        return np.asarray(states.mean(0, dtype=np.float64), np.float32)
    return np.array(states[0 if kind == "cls" else -1], np.float32)


def unit(vector: F32) -> F32:
    """The vector [n] divided by its length."""
    wide = vector.astype(np.float64)
    return np.asarray(wide / max(float(np.sqrt(wide @ wide)), _TINY), np.float32)


def listed(texts: Texts) -> list[Text]:
    """Texts of one text, of its token ids, or of a list of either. Raises InputError for none."""
    found: list[Any] = [texts] if isinstance(texts, str) else list(texts)
    if found and all(isinstance(t, int | np.integer) and not isinstance(t, bool) for t in found):
        found = [found]
    if not found:
        raise InputError("there is no text", expected="at least one")
    return found


def text_ids(model: Embeds, text: Text) -> list[int]:
    """Token ids of a text, with what the tokenizer puts around it. Raises InputError for a text that is empty or too long, UnsupportedError."""
    if isinstance(text, str) and len(text) > _LONGEST * model.context:
        raise _too_long(model, f"a text of {len(text)} characters")
    ids = model.tokenizer.encode(text) if isinstance(text, str) else _whole(text)
    if not ids:
        raise InputError("a text is empty", expected="a text or token ids")
    if len(ids) > model.context:
        raise _too_long(model, f"{len(ids)} tokens")
    return ids


def _whole(ids: Any) -> list[int]:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InputError("a text must be a string or a list of token ids", found=f"{array.dtype} {list(array.shape)}")
    return [int(i) for i in array]


def _too_long(model: Embeds, found: str) -> InputError:
    return InputError(
        "a text is longer than the model's context", expected=f"at most {model.context} tokens", found=found
    )
