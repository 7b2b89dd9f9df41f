"""How a long text is cut for a model of limited context, and which tokens are scored.

halves    windows of `context` tokens without overlap; the second half of each is scored, so that every scored token has at least
          context // 2 tokens before it. BOS takes the place of a window's first token. What is left at the end is not used.
          This is what llama.cpp's perplexity tool does, and what most published figures of GGUF files are.
sliding   windows move by `stride` tokens; every token of the text is scored once, with at least context - stride tokens before it
          (fewer at the beginning of the text), as the page on perplexity in transformers' documentation proposes. BOS stands in front of
          each window and not only of the first. stride = context - 1: each window stands for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError

__all__ = ["Window", "halves", "sliding"]


@dataclass(frozen=True, slots=True)
class Window:
    """tokens [T] (BOS among them); those from index `first` >= 1 on are scored, each given all before it.

    start, stop: the scored ones in the text, which does not count BOS.
    """

    tokens: NDArray[np.int64]
    first: int
    start: int
    stop: int


def halves(text: NDArray[np.int64], context: int, bos: int | None) -> Iterator[Window]:
    """Windows of `context` >= 4 tokens of which the second half is scored. Raises InputError if the text does not fill one."""
    lead = 0 if bos is None else 1  # the text is counted with one BOS in front, as a tokenizer gives it
    if len(text) + lead < context:
        raise InputError(
            "the text is too short for one window",
            expected=f"at least {context} tokens",
            found=len(text) + lead,
            hint=f"give more text, a smaller --context, or --stride {max(1, min(context, len(text)) // 2)}",
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
    """Windows of at most `context` tokens that move by 1 <= `stride` < `context`. Raises InputError for other strides or too little text."""
    if not 1 <= stride < context:
        raise InputError("the stride does not fit the window", expected=f"1 to {context - 1}", found=stride)
    room = context if bos is None else context - 1
    begun = 0 if bos is not None else 1  # without BOS nothing stands before the first token
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
