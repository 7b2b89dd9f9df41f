"""Prompt lookup: tokens that followed the same tokens earlier in the text are verified together in one pass.

Answers that edit, quote or repeat their prompt often continue as an earlier part of the text did (Saxena 2023, "Prompt
Lookup Decoding"). A pass over the next token and d drafted ones reads the weights once. Each row of its logits selects
a token as a single step would, with the same sampling, penalties and constraint; the first token that differs from its
draft ends the pass, and the positions after it are dropped. So drafts affect the speed only, up to rounding:

* Up to EXACT drafts, a pass is made of single steps as far as bits are concerned (Decoder.stepwise), and it is only
  used if the products of the model's matrices have the bits of single steps too (`rows_agree`). Then the answers are
  identical.
* More drafts are faster, but the kernels for five and more tokens add in a different order: logits differ in the last
  digits, so a near tie of two tokens can be decided differently, as in a batch of several sequences.

The number of drafts follows from measured times of passes and from how often earlier drafts were right. Passes that
were wasted are limited to `_CREDIT` single steps and a share `_INTEREST` of all steps, plus what drafts have saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polyquant.errors import InputError
from polyquant.runtime.expert_linear import ExpertLinear

__all__ = ["EXACT", "LONGEST", "PassTimes", "PromptLookup", "Steps", "checked_drafts", "matching_end", "rows_agree"]

EXACT = 3
"""Drafts per pass up to which answers are identical to those without drafts."""
LONGEST = 31
"""Maximum drafts per pass."""
_GRAMS = (5, 3, 2)  # lengths of the token sequences that are looked up, longest first
_COMPARED = 32  # tokens before a match that are compared
_RESUMED = 3  # tokens after a changed one in which its text is followed further
_CREDIT, _INTEREST, _MOST_CREDIT = 1.0, 0.005, 24.0  # of wasted time, in single steps
_GAIN = 1.05  # expected tokens per time of a step: less is not worth a pass
_USUAL = {1: 1.0, 2: 1.3, 4: 2.0, 5: 2.6, 8: 2.7, 16: 4.2, 32: 7.0}  # times of passes before any is measured


def checked_drafts(drafts: object) -> int:
    """Return the maximum drafts per pass, 0 for none. Raises InputError."""
    if isinstance(drafts, bool) or not isinstance(drafts, int) or not 0 <= drafts <= LONGEST:
        raise InputError("prompt_lookup is out of range", expected=f"an integer of 0 to {LONGEST}", found=drafts)
    return drafts


class PassTimes:
    """Recent times of passes by their number of tokens, for all sequences of a decoder."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def add(self, tokens: int, seconds: float) -> None:
        """Include a pass in the moving average; one that was interrupted counts three times the average at most."""
        old = self._seconds.get(tokens, seconds)
        self._seconds[tokens] = old + 0.25 * (min(seconds, 3 * old) - old)

    def steps(self, tokens: int) -> float | None:
        """Return the time of a pass in single steps, None before a step was measured.

        Unmeasured numbers of tokens are estimated from the nearest measured one.
        """
        one = self._seconds.get(1)
        if one is None:
            return None
        near = min((n for n in self._seconds if n > 1), key=lambda n: abs(n - tokens), default=1)
        return self._seconds[near] / one * _usual(tokens) / _usual(near)


def _usual(tokens: int) -> float:
    return float(np.interp(tokens, list(_USUAL), list(_USUAL.values())))


class Steps:
    """The share of correct drafts after matches of some length: a moving average over drafted tokens."""

    def __init__(self, right: float) -> None:
        """right: the share to begin with."""
        self._right, self._all = 2 * right, 2.0

    @property
    def share(self) -> float:
        """Probability that the next drafted token is right, given that those before it were."""
        return self._right / self._all

    def add(self, drafted: int, accepted: int) -> None:
        """Include a pass: the accepted tokens were right, the one after them was not."""
        self._right = 0.8 * self._right + accepted
        self._all = 0.8 * self._all + accepted + (accepted < drafted)


class PromptLookup:
    """The drafts of one sequence. most: maximum per pass. drafted, accepted: tokens so far; passes: with drafts.

    exact: passes have the bits of single steps.
    """

    def __init__(self, most: int, times: PassTimes) -> None:
        self.most, self.exact, self._times = most, most <= EXACT, times
        self.drafted = self.accepted = self.passes = 0
        self._next: dict[tuple[int, ...], int] = {}  # a sequence of tokens -> the position after it
        self._known = 0
        self._odds = [Steps(0.5), Steps(0.7), Steps(0.85), Steps(0.95)]  # by length of the match
        self._resumed = Steps(0.6)
        self._used = self._odds[0]  # those of the last draft
        self._at: int | None = None  # where the text continued that the last pass followed, one token skipped
        self._skipped = 0  # tokens since
        self._credit = _CREDIT

    def draft(self, history: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that may follow `history`, the text so far; [] if a single step is faster."""
        self._read(history)
        most = min(most, self.most)
        start = self._find(history) if most > 0 and self._times.steps(1) is not None else None
        count = 0 if start is None else self._count(most)
        if start is None or not count:
            return []
        self._at, self._skipped = start, 0
        period = len(history) - start
        out = list(history[start : start + count])
        while len(out) < count:  # the match overlaps the end: a repetition
            out.append(out[len(out) - period])
        return out

    def add(self, drafted: int, accepted: int, seconds: float) -> None:
        """Include a pass of 1 + drafted tokens."""
        self._times.add(1 + drafted, seconds)
        self._credit = min(self._credit + _INTEREST, _MOST_CREDIT)
        if not drafted:
            self._skip(1)
            return
        self._skip(1 + accepted, lost=not accepted)
        self.passes, self.drafted, self.accepted = self.passes + 1, self.drafted + drafted, self.accepted + accepted
        self._used.add(drafted, accepted)
        spent = self._times.steps(1 + drafted) or 0.0
        self._credit = min(self._credit + accepted + 1 - spent, _MOST_CREDIT)

    def _skip(self, tokens: int, *, lost: bool = False) -> None:
        """Advance in the passage that is followed; drop it after `_RESUMED` tokens, or if all drafts were wrong."""
        self._skipped += 1
        self._at = None if self._at is None or lost or self._skipped > _RESUMED else self._at + tokens

    def _read(self, history: Sequence[int]) -> None:
        """Include tokens of the text; a sequence is only known once the token after it is."""
        for end in range(self._known, len(history)):
            for n in _GRAMS:
                if end >= n:
                    self._next[tuple(history[end - n : end])] = end
        self._known = len(history)

    def _find(self, history: Sequence[int]) -> int | None:
        """Return the position of the likely next token: after the last match of the end of the history, or in the
        passage that was followed until a token was changed."""
        for n in _GRAMS:
            start = self._next.get(tuple(history[-n:])) if len(history) >= n else None
            if start is not None and (n == _GRAMS[0] or self._at is None):
                self._used = self._odds[_level(matching_end(history, start, _COMPARED))]
                return start
        self._used = self._resumed
        return self._at if self._at is not None and self._at < len(history) else None

    def _count(self, most: int) -> int:
        """Return the number of drafts with most expected tokens per time, 0 if a single step has more."""
        expected, best, rate = 1.0, 0, _GAIN
        for count in range(1, most + 1):
            expected += self._used.share**count
            spent = self._times.steps(1 + count) or 0.0
            if spent - 1 <= self._credit and expected / spent > rate:
                best, rate = count, expected / spent
        return best


def matching_end(history: Sequence[int], start: int, most: int) -> int:
    """Return how many tokens before `start` equal those at the end of the text, up to `most`."""
    count = 0
    while count < min(start, most) and history[start - 1 - count] == history[len(history) - 1 - count]:
        count += 1
    return count


def _level(matched: int) -> int:
    return (matched > 2) + (matched > 4) + (matched > 8)


def rows_agree(linears: Sequence[Any]) -> bool:
    """Return whether products of 2 to 1 + EXACT rows have the bits of single rows, for matrices of a decoder.

    Kernels depend on the codec, the rounding of inputs and the number of rows, not on values, so the smallest matrix of
    each kind is multiplied.
    """
    smallest: dict[object, Any] = {}
    for linear in linears:
        weights = list(_weights(linear))
        key = type(linear), tuple(w.codec.name for w in weights), linear.rounding, linear.kernel
        if key not in smallest or _size(weights) < _size(_weights(smallest[key])):
            smallest[key] = linear
    return all(_agrees(linear) for linear in smallest.values())


def _weights(linear: Any) -> Iterator[Any]:
    """Yield the matrices of a linear, or the first of each stack."""
    if isinstance(linear, ExpertLinear):
        yield from (stack if hasattr(stack, "codec") else stack[0] for stack in linear.stacks)
    else:
        yield from linear.weights


def _size(weights: Any) -> int:
    return sum(int(np.prod(w.shape)) for w in weights)


def _agrees(linear: Any) -> bool:
    cols = next(_weights(linear)).shape[-1]
    x = np.random.default_rng(0).standard_normal((1 + EXACT, cols)).astype(np.float32)
    same = np.zeros((1 + EXACT, 1), np.int32)  # all rows select one expert

    def product(rows: slice) -> Sequence[Any]:
        out: Sequence[Any] = linear(x[rows], same[rows]) if isinstance(linear, ExpertLinear) else linear(x[rows])
        return out

    single = [np.concatenate(y) for y in zip(*(product(slice(i, i + 1)) for i in range(1 + EXACT)), strict=True)]
    return all(
        np.array_equal(several.view(np.uint32), alone[:count].view(np.uint32))
        for count in range(2, 2 + EXACT)
        for several, alone in zip(map(np.ascontiguousarray, product(slice(count))), single, strict=True)
    )
