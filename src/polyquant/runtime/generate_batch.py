"""Generate from many prompts together.

    for answer in model.generate_batch(["Once upon a time", "And it came to pass"], max_tokens=64):
        print(answer.index, answer.text)

The answers end in any order; `parallel` of them are computed at once (runtime/batch.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from polyquant.errors import InputError
from polyquant.runtime.batch import Batch, Job, default_parallel
from polyquant.runtime.decoder import Decoder
from polyquant.runtime.generate import Finish, Generator, Token, generate
from polyquant.runtime.memory import default_memory
from polyquant.runtime.sampling import Sampling
from polyquant.types import Checkpoint

__all__ = ["Answer", "generate_batch"]


class BatchGenerator(Generator, Protocol):
    """The members of a model that are used here (runtime.model.Model)."""

    checkpoint: Checkpoint

    @property
    def decoder(self) -> Decoder:
        """The decoder."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to prompt `index`. prompt_tokens: their number; reused: how many of them were not computed again."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    finish: Finish
    prompt_tokens: int
    reused: int


def generate_batch(
    model: BatchGenerator,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_tokens: int | None = 128,
    sampling: Sampling | None = None,
    stop: str | Sequence[str] = (),
    add_special: bool = True,
    parallel: int | None = None,
    memory: int | None = None,
) -> Iterator[Answer]:
    """Return an iterator over the answers, in the order in which they end.

    sampling: answer i uses the seed `sampling.seed + i`. parallel: answers computed at once, by default 4 per thread of
    the kernels. memory: limit of all caches in bytes, by default half of the available memory; see runtime/batch.py.

    The other options are those of `generate`. Raises InputError, UnsupportedError, before any work for invalid prompts
    and options.
    """
    if isinstance(prompts, str):
        raise InputError("prompts must be a list", expected="strings, or lists of token ids", found="a string")
    batch = Batch(
        model.decoder,
        model.context,
        parallel=default_parallel() if parallel is None else parallel,
        memory=default_memory(model.checkpoint.nbytes) if memory is None else memory,
    )
    how, unused = sampling or Sampling(), model.session()
    jobs: dict[Job, int] = {}
    for index, prompt in enumerate(prompts):
        own = how if how.seed is None else replace(how, seed=how.seed + index)
        generation = generate(
            model, prompt, max_tokens=max_tokens, sampling=own, stop=stop, session=unused, add_special=add_special
        )
        jobs[batch.submit(generation)] = index
    return _answers(batch, jobs)


def _answers(batch: Batch, jobs: dict[Job, int]) -> Iterator[Answer]:
    """Advance the jobs; yield the answer of each that ends."""
    tokens: dict[Job, list[Token]] = {job: [] for job in jobs}
    while jobs:
        batch.advance()
        for job, index in tuple(jobs.items()):
            if not (job.running or job.ended):
                break  # jobs start in order
            tokens[job] += job.taken()
            if not job.ended:
                continue
            del jobs[job]
            yield _answer(job, index, tokens.pop(job))


def _answer(job: Job, index: int, tokens: Sequence[Token]) -> Answer:
    """Return a complete answer. Raises the error of one that failed."""
    generation = job.generation
    if job.problem is not None:
        raise job.problem
    assert generation.finish is not None
    text = "".join(token.text for token in tokens)
    return Answer(index, text, tuple(tokens), generation.finish, generation.prompt_tokens, generation.reused)
