"""Split a long text into windows for a model of limited context, and select the scored tokens.

halves    non-overlapping windows of `context` tokens; the second half of each is scored, so every scored token has at
least
          context // 2 tokens before it. BOS replaces a window's first token. A partial window at the end is not used.
          This matches llama.cpp's perplexity tool and most published perplexities of GGUF files.
sliding   windows move by `stride` tokens; every token is scored once, with at least context - stride tokens before it
          (fewer at the start of the text), as proposed in transformers' documentation on perplexity. BOS precedes each
          window, not only the first. stride = context - 1: each window is independent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError

__all__ = ["Window", "halves", "sliding"]


_LEAST = 64
"""Tokens below which a perplexity is meaningless, so that no stride is suggested."""


@dataclass(frozen=True, slots=True)
class Window:
    """tokens [T], including BOS; those from index `first` >= 1 on are scored, each given all before it.

    start, stop: the range of the scored tokens in the text, not counting BOS.
    """

    tokens: NDArray[np.int64]
    first: int
    start: int
    stop: int


def halves(text: NDArray[np.int64], context: int, bos: int | None) -> Iterator[Window]:
    """Yield windows of `context` >= 4 tokens whose second half is scored.

    Raises InputError if the text is shorter than one window.
    """
    lead = 0 if bos is None else 1  # the text is counted with a leading BOS, as tokenized
    if not len(text):
        raise InputError("the text has no tokens")
    if len(text) + lead < context:
        shorter = f"; eval also takes --stride {len(text) // 2}" if len(text) >= _LEAST else ""
        raise InputError(
            "the text, or the number of tokens requested, is too short for one window",
            expected=f"at least {context} tokens",
            found=len(text) + lead,
            hint=f"use more text, a larger --tokens or a smaller --context{shorter}",
        )
    first = context // 2 + 1
    for a in range(0, len(text) + lead - context + 1, context):
        start = a - lead
        if bos is None:
            tokens = text[start : start + context]
        else:
            tokens = np.concatenate([np.array([bos], np.int64), text[start + 1 : start + context]])
        yield Window(tokens, first, start + first, start + context)


def sliding(text: NDArray[np.int64], context: int, stride: int, bos: int | None) -> Iterator[Window]:
    """Yield windows of at most `context` tokens that move by 1 <= `stride` < `context`.

    Raises InputError for other strides or too little text.
    """
    if not 1 <= stride < context:
        raise InputError("the stride does not fit the window", expected=f"1 to {context - 1}", found=stride)
    room = context if bos is None else context - 1
    begun = 0 if bos is not None else 1  # without BOS there is no context for the first token
    if len(text) <= begun:
        raise InputError("the text is too short to be scored", expected=f"at least {begun + 1} tokens", found=len(text))
    end = min(room, len(text))
    while True:
        start = max(0, end - room)
        tokens = text[start:end]
        if bos is not None:
            tokens = np.concatenate([np.array([bos], np.int64), tokens])
        yield Window(tokens, len(tokens) - (end - begun), begun, end)
        if end == len(text):
            return
        begun, end = end, min(end + stride, len(text))
