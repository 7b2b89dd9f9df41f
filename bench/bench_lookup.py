"""Generate with prompt lookup: an answer that edits its prompt, and one that has little in common with it.

The weights of the 1B Llama are random, so the answers are given: a constraint allows one token at each step. Passes,
drafts and their acceptance are those of a model that answers so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import polyquant
from bench_run import llama
from measure import Row, Section, middle
from polyquant.analysis.demo import demo_model
from polyquant.runtime.generate import generate
from polyquant.runtime.model import Model

DOCS = Path(__file__).resolve().parent.parent / "docs"
LENGTH, ROUNDS = 256, 3
EVERY = 24  # of the tokens of an edited text, one is changed


class Given:
    """Allows the tokens of an answer, one after the other (sampling.Constraint)."""

    def __init__(self, tokens: Sequence[int], vocab: int) -> None:
        self._tokens, self._mask, self._at = tokens, np.zeros(vocab, np.bool_), 0

    def allowed(self) -> np.ndarray:
        """Return the mask of the next token."""
        self._mask[:] = False
        self._mask[self._tokens[self._at]] = True
        return self._mask

    def accept(self, token: int) -> None:
        """Go on to the next token."""
        self._at += 1


def texts() -> tuple[list[int], list[int], list[int]]:
    """Return a prompt, an edited copy of it, and another text, as tokens of English pages."""
    tokenizer = polyquant.load(demo_model("llama")).tokenizer
    prompt, other = (
        tokenizer.encode((DOCS / name).read_text(encoding="utf-8"), add_special=False)[:LENGTH]
        for name in ("scale.md", "calibration.md")
    )
    rng = np.random.default_rng(0)
    edited = [int(rng.integers(2000)) if i % EVERY == EVERY // 2 else token for i, token in enumerate(prompt)]
    return prompt, edited, other


def seconds(model: Model, prompt: list[int], answer: list[int], drafts: int) -> float:
    """Return the time of the answer after its first token."""
    given = Given(answer, model.vocab)
    generation = generate(model, prompt, max_tokens=len(answer), constraint=given, prompt_lookup=drafts)
    assert [token.id for token in generation] == answer
    return generation.seconds


def rows() -> Iterator[Row]:
    """Bars: edits 2.5 times as fast as without drafts, other texts at least 0.98 times."""
    prompt, edited, other = texts()
    for codec in ("q8_0", "q4_k"):
        model = polyquant.load(llama(codec), threads=2)
        for label, answer, bar in (("edited prompt", edited, 2.5), ("other text", other, 0.98)):
            for drafts in (3, 15):
                if model.session().lookup_problem(drafts):
                    continue
                taken = [[seconds(model, prompt, answer, n) for n in (0, drafts)] for _ in range(ROUNDS)]
                rate, gain = LENGTH / middle([run[0] for run in taken]), middle([run[0] / run[1] for run in taken])
                yield Row(f"{codec}, {label}, {drafts} drafts", "tokens/s", rate * gain, rate, bar, True)


SECTION = Section("prompt lookup against single steps", rows)
