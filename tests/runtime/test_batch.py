"""Sequences decoded together: the numbers of every architecture, and the scheduler's promises."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from architectures.golden_models import NAMES, Golden
from polyquant.analysis.demo import demo_model
from polyquant.architectures.find import of_config
from polyquant.errors import InputError
from polyquant.ops import native
from polyquant.runtime import batch as scheduler
from polyquant.runtime.batch import Batch
from polyquant.runtime.generate import generate
from polyquant.runtime.load import load
from polyquant.runtime.memory import available_memory, default_memory
from polyquant.runtime.sampling import Sampling
from polyquant.runtime.session import Session, feed_together

RECORDS = {name: of_config(Golden(name).config) for name in NAMES}
RUN = [name for name, record in RECORDS.items() if record is not None and record.runs and not record.encoder]
PROMPTS = ["And it came to pass", "The king of Judah", "In the", "He said unto them, Go", "Pharaoh dreamed", "Now"]
MEMORY = 1 << 30


@pytest.fixture(scope="module")
def model():
    return load(demo_model("llama"), activations="float")


def advanced(batch, jobs):
    """Run the batch to its end, and return the generated text of each job."""
    texts = [""] * len(jobs)
    while batch.advance():
        for i, job in enumerate(jobs):
            texts[i] += "".join(token.text for token in job.taken())
    return [text + "".join(token.text for token in job.taken()) for text, job in zip(texts, jobs, strict=True)]


def single(model, prompt, **options):
    return "".join(token.text for token in model.generate(prompt, **options))


# ---------------------------------------------------------------- one step


@pytest.mark.parametrize("name", RUN)
def test_a_step_of_several_sequences_equals_single_steps(name):
    model = load(Golden(name).folder, activations="float")
    rng = np.random.default_rng(len(name))
    prompts = [rng.integers(0, model.vocab, n).tolist() for n in (9, 1, 5)]
    together, apart = ([model.session() for _ in prompts] for _ in range(2))
    for sessions in (together, apart):
        for session, prompt in zip(sessions, prompts, strict=True):
            session.feed(prompt)
    for _ in range(3):
        tokens = rng.integers(0, model.vocab, len(prompts)).tolist()
        found = feed_together(together, tokens)
        expected = np.stack([s.feed([token]) for s, token in zip(apart, tokens, strict=True)])
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    assert [s.tokens for s in together] == [s.tokens for s in apart]
    assert [s.position for s in together] == [s.position for s in apart]


def test_layers_that_are_not_separable_are_computed_one_by_one(model, monkeypatch):
    sessions, tokens = [model.session() for _ in range(2)], [5, 7]
    expected = feed_together(sessions, tokens)
    monkeypatch.setattr(model.decoder, "_separable", False)
    np.testing.assert_allclose(feed_together([model.session() for _ in range(2)], tokens), expected, atol=1e-5)


@pytest.mark.skipif(not native.available(), reason="BLAS sums in an order that depends on the number of rows")
@pytest.mark.parametrize("codec", ["q4_k", "q8_0"])
def test_a_sequence_does_not_depend_on_the_others(codec, demo_files):
    model, rng = load(demo_files("llama", codec)), np.random.default_rng(3)
    outputs = []
    for count in (6, 9, 16):  # other numbers of other sequences
        sessions = [model.session() for _ in range(count)]
        sessions[2].feed([1, 2, 3, 4])
        tokens = rng.integers(0, model.vocab, (2, count))
        tokens[:, 2] = 8, 9
        outputs.append([feed_together(sessions, row.tolist())[2] for row in tokens])
    for other in outputs[1:]:
        np.testing.assert_array_equal(other, outputs[0])


def test_invalid_steps_change_nothing(model):
    session = model.session()
    with pytest.raises(InputError, match="different sessions"):
        feed_together([session, session], [1, 2])
    with pytest.raises(InputError, match="vocabulary"):
        feed_together([session, model.session()], [1, model.vocab])
    assert session.position == 0 and session.tokens == []


# ---------------------------------------------------------------- jobs


@pytest.mark.parametrize("parallel", [1, 4])
def test_jobs_equal_single_generations(parallel, model):
    options = [
        {"max_tokens": 12},
        {"max_tokens": 20, "sampling": Sampling(0.8, seed=5)},
        {"max_tokens": 30, "stop": "king"},
        {"max_tokens": 1},
        {"max_tokens": 9, "sampling": Sampling(1.0, top_k=20, repetition_penalty=1.2, seed=1)},
    ]
    batch = Batch(model.decoder, model.context, parallel=parallel, memory=MEMORY)
    expected = [generate(model, prompt, **o) for prompt, o in zip(PROMPTS, options, strict=False)]
    texts = ["".join(token.text for token in generation) for generation in expected]
    jobs = [batch.submit(generate(model, prompt, **o)) for prompt, o in zip(PROMPTS, options, strict=False)]
    assert advanced(batch, jobs) == texts
    for job, alone in zip(jobs, expected, strict=True):
        assert job.ended and job.problem is None
        assert (job.generation.finish, job.generation.generated) == (alone.finish, alone.generated)
    assert not batch.advance() and batch.running == batch.waiting == 0


def test_long_prompts_are_processed_in_pieces_with_equal_results(model):
    prompt = np.random.default_rng(0).integers(3, model.vocab, 300).tolist()
    batch = Batch(model.decoder, model.context, parallel=2, memory=MEMORY)
    jobs = [batch.submit(generate(model, p, max_tokens=8)) for p in (prompt, prompt[:129])]
    assert advanced(batch, jobs) == [single(model, p, max_tokens=8) for p in (prompt, prompt[:129])]
    assert jobs[1].generation.reused == 0


class Clock:
    """A clock that advances by 10 for each piece of a prompt, and by 1 for each step; `seen` lists both."""

    def __init__(self, monkeypatch):
        self.now, self.seen = 0.0, []
        monkeypatch.setattr(scheduler, "perf_counter", lambda: self.now)
        step = scheduler.feed_together

        def feed_together_(sessions, tokens):
            self.took(1, len(sessions))
            return step(sessions, tokens)

        monkeypatch.setattr(scheduler, "feed_together", feed_together_)
        for name in ("prefill", "feed"):
            monkeypatch.setattr(Session, name, self.piece(getattr(Session, name)))

    def piece(self, feed):
        def timed(session, tokens):
            if len(tokens) > 1:
                self.took(10, session)
            return feed(session, tokens)

        return timed

    def took(self, seconds, what):
        self.now += seconds
        self.seen.append(what)


def test_long_prompts_and_generations_share_the_time(model, monkeypatch):
    clock = Clock(monkeypatch)
    batch = Batch(model.decoder, model.context, parallel=8, memory=MEMORY)
    stream = batch.submit(generate(model, "And it came", max_tokens=100))
    while stream.token is None:
        batch.advance()
    rng = np.random.default_rng(0)
    long, other = (batch.submit(generate(model, rng.integers(3, 900, 500).tolist(), max_tokens=2)) for _ in range(2))
    short = batch.submit(generate(model, "The king", max_tokens=2))
    clock.seen.clear()
    while not short.ended:
        batch.advance()
    assert not long.ended and long.fed == other.fed == 128  # it waited for one piece of each, not for the prompts
    while batch.advance():
        pass
    pieces = [i for i, what in enumerate(clock.seen) if isinstance(what, Session)]
    assert all(b - a == 11 for a, b in pairwise(pieces[:8]))  # ten steps of 1 after each piece of 10
    assert len({id(clock.seen[i]) for i in pieces[:3]}) == 3
    assert all(a is not b for a, b in pairwise(clock.seen[i] for i in pieces[3:9]))  # the long ones alternate


def test_memory_limits_how_many_run(model):
    size = model.decoder.cache_bytes(64)
    batch = Batch(model.decoder, model.context, parallel=8, memory=2 * size)
    jobs = [batch.submit(generate(model, [5] * 32, max_tokens=32)) for _ in range(5)]
    most = 0
    while batch.advance():
        most = max(most, batch.running)
        held = sum(job.generation.session.cache.nbytes for job in jobs if job.running)
        assert (
            held + sum(s.cache.nbytes for s in batch._idle) <= 3 * size
        )  # one cache may be evicted while it is copied
    assert most == 2 and all(job.generation.generated == 32 for job in jobs)
    alone = batch.submit(generate(model, [7] * 100, max_tokens=150))  # more than the limit: it runs alone
    after = batch.submit(generate(model, [7] * 4, max_tokens=3))
    batch.advance()
    assert alone.running and not after.running
    while batch.advance():
        pass
    assert alone.generation.generated == 150 and after.generation.generated == 3


def test_unlimited_answers_pause_when_memory_runs_out(monkeypatch):
    monkeypatch.setattr(scheduler, "_GROWTH", 32)
    model = load(demo_model("llama"), activations="float", context=128)
    batch = Batch(model.decoder, model.context, parallel=4, memory=model.decoder.cache_bytes(128))
    jobs = [batch.submit(generate(model, [9, i], max_tokens=None)) for i in (5, 6)]
    for job in jobs:
        job.generation._ends = frozenset()  # until the context is full
    lengths = []
    while batch.advance():
        lengths.append(tuple(job.generation.generated for job in jobs))
        assert sum(job.reserved_bytes for job in jobs if job.running) <= 1.5 * batch.memory  # the oldest never pauses
    paused = [(a, b) for a, b in pairwise(lengths) if a[1] == b[1] > 0 and a[0] < b[0]]
    assert len(paused) > 30 and all(job.generation.full and job.generation.generated == 127 for job in jobs)


def test_owners_take_turns(model):
    batch = Batch(model.decoder, model.context, parallel=2, memory=MEMORY)
    many = [batch.submit(generate(model, PROMPTS[0], max_tokens=4), "first") for _ in range(6)]
    one = batch.submit(generate(model, PROMPTS[1], max_tokens=4), "second")
    while not one.ended:
        batch.advance()
    assert sum(job.ended for job in many) <= 3


def test_an_error_ends_only_its_job(model, monkeypatch):
    batch = Batch(model.decoder, model.context, parallel=4, memory=MEMORY)
    jobs = [batch.submit(generate(model, prompt, max_tokens=10)) for prompt in PROMPTS[:4]]
    for _ in range(6):
        batch.advance()

    def fails(logits):
        raise InputError("broken")

    monkeypatch.setattr(jobs[1].generation, "choose", fails)

    def full(*args, **options):
        raise MemoryError

    monkeypatch.setattr(jobs[2].generation.session.cache, "attend", full)
    while batch.advance():
        pass
    assert [type(job.problem) for job in jobs] == [type(None), InputError, MemoryError, type(None)]
    for i in (0, 3):
        assert "".join(token.text for token in jobs[i].taken()) == single(model, PROMPTS[i], max_tokens=10)
    again = batch.submit(generate(model, PROMPTS[2], max_tokens=10))
    assert advanced(batch, [again]) == [single(model, PROMPTS[2], max_tokens=10)]


def test_cancelled_jobs_leave_the_others_alone(model):
    batch = Batch(model.decoder, model.context, parallel=3, memory=MEMORY)
    jobs = [batch.submit(generate(model, prompt, max_tokens=12)) for prompt in PROMPTS[:3]]
    prompt = np.random.default_rng(1).integers(3, 900, 400).tolist()
    waiting = batch.submit(generate(model, PROMPTS[3], max_tokens=12))
    while jobs[1].token is None:
        batch.advance()
    batch.cancel(jobs[1])
    batch.cancel(waiting)
    inside = batch.submit(generate(model, prompt, max_tokens=12))
    while not inside.fed:
        batch.advance()
    batch.cancel(inside)
    batch.cancel(inside)
    while batch.advance():
        pass
    for i in (0, 2):
        assert "".join(token.text for token in jobs[i].taken()) == single(model, PROMPTS[i], max_tokens=12)
    assert batch.running == batch.waiting == 0 and jobs[1].ended and waiting.ended and inside.ended
    rest = batch.submit(generate(model, prompt, max_tokens=4))  # the piece that was processed is used again
    assert advanced(batch, [rest]) == [single(model, prompt, max_tokens=4)] and rest.generation.reused == 128


@pytest.mark.parametrize(("name", "cache"), [("llama", "f32"), ("llama", "f16"), ("llama", "int8"), ("lfm2", "f32")])
def test_prefixes_are_reused_and_copied(name, cache):
    model = load(demo_model(name) if name == "llama" else Golden(name).folder, activations="float", cache=cache)
    rng = np.random.default_rng(2)
    shared = rng.integers(3, model.vocab, 96).tolist()
    batch = Batch(model.decoder, model.context, parallel=3, memory=MEMORY)
    first = batch.submit(generate(model, shared, max_tokens=40))
    while batch.advance():
        pass
    chat = [*shared, *first.generation.session.tokens[96:], 7, 8, 9]
    jobs = [batch.submit(generate(model, p, max_tokens=10)) for p in ([*shared, 5, 6], [*shared, 11], chat)]
    while batch.advance():
        pass
    marked = 95 if name == "lfm2" else 96  # a recurrent state is kept before the last token of a prompt
    assert [job.generation.reused for job in jobs] == [marked, marked, 128 if cache == "int8" else 135]
    for job in jobs:
        fresh = model.generate(job.generation.prompt, max_tokens=10)
        assert [t.id for t in job.taken()] == [t.id for t in fresh]


def test_prompts_in_progress_are_shared(model, monkeypatch):
    rng, pieces = np.random.default_rng(4), []
    shared = rng.integers(3, model.vocab, 400).tolist()
    prompts = [[*shared, i] for i in range(4)]
    expected = [single(model, p, max_tokens=5) for p in prompts]
    for name in ("prefill", "feed"):
        monkeypatch.setattr(Session, name, counted(getattr(Session, name), pieces))
    batch = Batch(model.decoder, model.context, parallel=4, memory=MEMORY)
    jobs = [batch.submit(generate(model, p, max_tokens=5)) for p in prompts]
    assert advanced(batch, jobs) == expected
    assert [job.generation.reused for job in jobs] == [0, 400, 400, 400]
    assert sum(pieces) == 401 + 3

    leader, follower = (batch.submit(generate(model, [2, *p], max_tokens=5)) for p in prompts[:2])
    while not leader.fed:
        batch.advance()
    batch.cancel(leader)
    assert advanced(batch, [follower]) == [single(model, [2, *prompts[1]], max_tokens=5)]
    assert follower.generation.reused == 128


def counted(feed, pieces):
    def noting(session, tokens):
        pieces.append(len(tokens))
        return feed(session, tokens)

    return noting


def test_memory_of_this_machine(tmp_path, monkeypatch):
    from polyquant.runtime import memory

    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    8000000 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_GROUP", group)
    assert available_memory() == 8_192_000_000 and default_memory(192_000_000) == 4_000_000_000
    group.mkdir()
    (group / "memory.current").write_text("1000000000\n")
    (group / "memory.max").write_text("max\n")
    assert available_memory() == 8_192_000_000
    (group / "memory.max").write_text("3000000000\n")
    assert available_memory() == 2_000_000_000 and default_memory(1 << 40) == 256 << 20
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "missing")
    (group / "memory.max").write_text("max\n")
    assert available_memory() > 1 << 20


@pytest.mark.parametrize("limits", [{"parallel": 0, "memory": 1}, {"parallel": 1, "memory": 0}])
def test_limits_are_checked(limits, model):
    with pytest.raises(InputError, match="out of range"):
        Batch(model.decoder, model.context, **limits)


# ---------------------------------------------------------------- model.generate_batch


def test_answers_of_many_prompts(model):
    prompts = [*PROMPTS, [5, 6, 7]]
    answers = sorted(model.generate_batch(prompts, max_tokens=8, parallel=3), key=lambda a: a.index)
    assert [a.text for a in answers] == [single(model, p, max_tokens=8) for p in prompts]
    assert all(len(a.tokens) == 8 and a.finish == "length" and a.prompt_tokens > 0 for a in answers)
    sampled = sorted(
        model.generate_batch([PROMPTS[0]] * 3, max_tokens=8, temperature=1.0, seed=4), key=lambda a: a.index
    )
    expected = [single(model, PROMPTS[0], max_tokens=8, temperature=1.0, seed=4 + i) for i in range(3)]
    assert [a.text for a in sampled] == expected


def test_invalid_prompts_are_reported_before_any_work(model):
    with pytest.raises(InputError, match="the prompt is empty"):
        model.generate_batch(["fine", []])
    with pytest.raises(InputError, match="prompts must be a list"):
        model.generate_batch("one text")
    assert list(model.generate_batch([])) == []
