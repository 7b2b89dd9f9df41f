"""Several generations at once: one pass over the weights computes the next token of all of them.

    batch = Batch(model.decoder, model.context, parallel=8, memory=1 << 30)
    job = batch.submit(generate(model, "Once upon a time"))
    while batch.advance():
        for token in job.taken():
            ...

Scheduling, all of it in the thread that calls `advance`:

* Jobs start in order of submission, except that an owner with fewer running jobs goes first. A job starts when fewer
  than `parallel` run and the memory for its prompt and its answer is free. For an answer without a limit, memory is
  reserved `_GROWTH` tokens at a time: a job that gets no more pauses until another one ends. The oldest job never waits
  for memory.
* Prompts are processed in pieces of `_PIECE` tokens, in turn. While other jobs generate, prompts get half of the time:
  a token is delayed by at most one piece, and each prompt by the pieces of the others.
* The caches of ended jobs are kept while memory allows: a prompt continues the one with the longest common prefix, or a
  copy of it. A prompt that shares more with one that is being processed waits for it, and copies its cache.

A job that fails ends with its error; the others are not affected.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from time import perf_counter

from polyquant.errors import InputError, PolyquantError
from polyquant.ops import native
from polyquant.runtime.decoder import Decoder
from polyquant.runtime.generate import Generation, Token
from polyquant.runtime.session import Session, common_prefix, feed_together
from polyquant.types import F32

__all__ = ["Batch", "Job", "default_parallel"]

_PIECE = 128  # prompt tokens per pass
_LOST = 32  # tokens by which the cache of an ended job is truncated rather than copied
_GROWTH = 1024  # tokens of an unlimited answer for which memory is reserved at a time


class Job:
    """A generation in a batch.

    running: it has started and not ended. ended: it is complete, cancelled, or failed with `problem`.
    """

    def __init__(self, generation: Generation, owner: object) -> None:
        self.generation, self.owner = generation, owner
        self.problem: Exception | None = None
        self.running = self.ended = False
        self.fed = 0  # prompt tokens in the cache
        self.leader: Job | None = None  # processes the first `shared` tokens of this prompt
        self.shared = 0
        self.token: int | None = None  # to be fed next
        self.reserved = self.reserved_bytes = 0
        self._tokens: deque[Token] = deque()

    def taken(self) -> Iterator[Token]:
        """Yield the tokens generated since the last call."""
        while self._tokens:
            yield self._tokens.popleft()

    def take(self, logits: F32) -> None:
        """Choose the next token. Raises PolyquantError."""
        token = self.generation.choose(logits)
        self.token = token.id
        self._tokens.append(token)

    def step(self) -> None:
        """Compute and choose the next tokens. Raises PolyquantError."""
        assert self.token is not None
        for token in self.generation.step(self.token):
            self.token = token.id
            self._tokens.append(token)

    @property
    def follows(self) -> bool:
        """True while the tokens shared with another prompt are being processed."""
        return self.leader is not None and self.leader.running and self.leader.fed < self.shared

    @property
    def length(self) -> int:
        """Tokens that the cache holds after the next step."""
        return len(self.generation.prompt) + self.generation.generated


class Batch:
    """Jobs of one decoder. parallel: how many run at once. memory: limit of all caches in bytes."""

    def __init__(self, decoder: Decoder, context: int, *, parallel: int, memory: int) -> None:
        """context: maximum tokens of a sequence. Raises InputError for limits below 1."""
        for what, value in (("parallel", parallel), ("memory", memory)):
            if value < 1:
                raise InputError(f"{what} is out of range", expected="an integer of at least 1", found=value)
        self.decoder, self.context, self.parallel, self.memory = decoder, context, parallel, memory
        self._waiting: list[Job] = []
        self._running: list[Job] = []  # oldest first
        self._prompts: deque[Job] = deque()  # running jobs whose prompt is not processed yet
        self._idle: list[Session] = []  # least recently used first
        self._owed = 0.0  # seconds that generating jobs may use before the next piece of a prompt

    @property
    def waiting(self) -> int:
        """Number of jobs that have not started."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of jobs that have started and not ended."""
        return len(self._running)

    def submit(self, generation: Generation, owner: object = None) -> Job:
        """Add a generation that has not started; its session is replaced when it starts."""
        job = Job(generation, owner)
        self._waiting.append(job)
        return job

    def cancel(self, job: Job) -> None:
        """End a job, whether it is waiting, running or has ended."""
        if job in self._waiting:
            self._waiting.remove(job)
            job.ended = True
        elif not job.ended:
            self._end(job, job.generation.session)

    def advance(self) -> bool:
        """Process a piece of a prompt, or one token of all generating jobs. Returns False if no jobs are left."""
        self._admit()
        ready = [job for job in self._running if job.token is not None and self._has_room(job)]
        began = perf_counter()
        if self._prompts and (self._owed <= 0 or not ready):
            while self._prompts[0].follows:  # a leader does not follow those that started after it
                self._prompts.rotate(-1)
            self._process(self._prompts.popleft())
            self._owed = perf_counter() - began
        elif ready:
            self._generate(ready)
            self._owed -= perf_counter() - began
        return bool(self._running or self._waiting)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.parallel:
            owners = Counter(job.owner for job in self._running)
            job = min(self._waiting, key=lambda job: owners[job.owner])  # the first among equal ones
            generation = job.generation
            growth = min(generation.limit, _GROWTH) if generation.unlimited else generation.limit
            if not self._reserve(job, len(generation.prompt) + growth):
                return
            self._waiting.remove(job)
            self._start(job)

    def _start(self, job: Job) -> None:
        prompt = job.generation.prompt
        job.running = True
        self._continue(job)
        for other in self._prompts:
            common = common_prefix(other.generation.prompt, prompt[:-1])
            if common > max(job.fed + _PIECE, job.shared):
                job.leader, job.shared = other, common
        self._running.append(job)
        self._prompts.append(job)
        self._evict()

    def _continue(self, job: Job) -> None:
        """Let a job continue the best session."""
        generation = job.generation
        generation.session, job.fed = self._session(generation.prompt)
        generation.reused = job.fed

    def _session(self, prompt: Sequence[int]) -> tuple[Session, int]:
        """Return a session that holds as many tokens of the prompt as possible, except the last, and their number."""
        found = [(s.cache.reachable(s.common(prompt[:-1])), s) for s in self._idle]
        found += [
            (s.cache.reachable(s.common(prompt[:-1])), s) for s in (job.generation.session for job in self._running)
        ]
        common, best = max(found, key=lambda pair: pair[0], default=(0, None))
        if best is None or common == 0:
            return Session(self.decoder, self.context), 0
        if best in self._idle and best.position - common <= _LOST:
            self._idle.remove(best)
        else:
            best = best.fork(common)
        best.rewind(common)
        return best, common

    def _has_room(self, job: Job) -> bool:
        """Return whether memory is reserved for the next token of a job."""
        return job.length <= job.reserved or self._reserve(job, job.reserved + _GROWTH)

    def _reserve(self, job: Job, tokens: int) -> bool:
        """Reserve memory for N tokens of a job, if it is free or the job is the oldest one."""
        tokens = min(tokens, self.context)
        size = self.decoder.cache_bytes(tokens)
        oldest = not self._running or self._running[0] is job
        others = sum(other.reserved_bytes for other in self._running if other is not job)
        if not oldest and others + size > self.memory:
            return False
        job.reserved, job.reserved_bytes = tokens, size
        self._evict()
        return True

    def _evict(self) -> None:
        """Drop idle sessions that exceed the memory, least recently used first, and more than `parallel` of them."""
        free = self.memory - sum(job.reserved_bytes for job in self._running)
        sizes = [self.decoder.cache_bytes(s.position) for s in self._idle]
        while self._idle and (sum(sizes) > free or len(sizes) > self.parallel):
            del self._idle[0], sizes[0]

    def _process(self, job: Job) -> None:
        """Process the next piece of a prompt; after the last one, choose the first token."""
        if job.leader is not None:
            job.leader = None
            self._continue(job)
        generation, session = job.generation, job.generation.session
        piece = generation.prompt[job.fed : job.fed + _PIECE]
        began = perf_counter()
        try:
            if job.fed + len(piece) < len(generation.prompt):
                session.prefill(piece)
                self._prompts.append(job)
            else:
                if session.cache.recurrent and len(piece) > 1:  # a mark from which the same prompt can be repeated
                    session.prefill(piece[:-1])
                self._take(job, session.feed(generation.prompt[session.position :]))
            job.fed += len(piece)
        except (PolyquantError, MemoryError) as problem:
            self._fail(job, problem)
        generation.prompt_seconds += perf_counter() - began

    def _generate(self, jobs: Sequence[Job]) -> None:
        """Compute the next token of each job."""
        if len(jobs) == 1 and jobs[0].generation.lookup is not None:
            return self._step(jobs[0])
        began = perf_counter()
        try:
            logits = feed_together([job.generation.session for job in jobs], [job.token or 0 for job in jobs])
        except (PolyquantError, MemoryError) as problem:
            if len(jobs) == 1:
                return self._fail(jobs[0], problem)
            for job in jobs:  # one after the other: only those that fail end
                self._generate([job])
            return
        seconds = perf_counter() - began
        for job, row in zip(jobs, logits, strict=True):
            job.generation.seconds += seconds
            self._take(job, row)

    def _step(self, job: Job) -> None:
        """Compute the next tokens of a job, with drafts."""
        try:
            job.step()
        except (PolyquantError, MemoryError) as problem:
            self._fail(job, problem)
        else:
            if job.generation.finish is not None:
                self._end(job, job.generation.session)

    def _take(self, job: Job, logits: F32) -> None:
        try:
            job.take(logits)
        except PolyquantError as problem:
            self._fail(job, problem)
        else:
            if job.generation.finish is not None:
                self._end(job, job.generation.session)

    def _fail(self, job: Job, problem: Exception) -> None:
        """End a job. Its session is dropped, since its layers may hold different numbers of tokens."""
        job.problem = problem
        self._end(job, None)

    def _end(self, job: Job, session: Session | None) -> None:
        job.running, job.ended = False, True
        self._running.remove(job)
        if job in self._prompts:
            self._prompts.remove(job)
        if session is not None and session.position:
            self._idle.append(session)
        self._evict()


def default_parallel() -> int:
    """Return how many jobs run at once by default: four per thread of the kernels."""
    return 4 * native.threads()
