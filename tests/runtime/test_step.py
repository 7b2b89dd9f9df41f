"""A recorded step gives, bit for bit, the output of Python without one, regardless of other calls in between."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import polyquant
from golden import VECTORS
from polyquant.ops import native
from polyquant.ops.decoder import add
from polyquant.runtime.decoder import Decoder
from polyquant.runtime.model import Model

pytestmark = pytest.mark.skipif(native.lib() is None, reason="recording needs the native kernels")

MODELS = [
    *sorted(p for p in (VECTORS / "runtime").iterdir() if p.is_dir()),
    *sorted((VECTORS / "models").glob("*/*.gguf")),
    *sorted((VECTORS / "models").glob("*/hf")),
    *(Path(polyquant.__file__).parent / "demo" / name for name in ("llama", "bitnet")),
]
LLAMA = VECTORS / "models/tiny-llama-tied/tiny-llama-tied-Q4_0.gguf"
KINDS = ["f32", "f16", "int8"]
LONG = 70
"""Tokens after which the cache has grown twice."""


def loaded(path: Path, **options) -> Model:
    """A model with a context of LONG tokens."""
    model = polyquant.load(path, **options)
    model._context = max(model.context, LONG)
    return model


def label(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def text(model: Model, tokens: int = LONG, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, model.vocab, tokens).tolist()


def walked(path: Path, tokens: list[int], **options) -> np.ndarray:
    """Logits token by token, each through Python."""
    model = loaded(path, **options)
    model.decoder._recordable = False
    session = model.session()
    logits = np.array([session.feed([t]) for t in tokens])
    assert session.cache.step is None
    return logits


@pytest.fixture
def walks(monkeypatch):
    """Number of passes through the layers in Python."""
    found = []
    through = Decoder._run_layers

    def counted(self, x, *rest):
        found.append(len(x))
        return through(self, x, *rest)

    monkeypatch.setattr(Decoder, "_run_layers", counted)
    return found


@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", MODELS, ids=label)
def test_every_architecture(path, kind, activations, walks):
    options = {"cache": kind, "activations": activations}
    model = loaded(path, **options)
    tokens = text(model)
    expected = walked(path, tokens, **options)
    walks.clear()
    session = model.session()
    for i, token in enumerate(tokens):
        np.testing.assert_array_equal(session.feed([token]), expected[i], err_msg=f"position {i}")
    assert len(walks) == 3  # at 0, 32 and 64 the cache grew
    assert session.position == LONG


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("back", [1, 20, 32, 36, 39])
def test_after_rewind(kind, back):
    model = polyquant.load(LLAMA, cache=kind)
    tokens, rest = text(model, 40), text(model, 40, seed=1)
    recorded, plain = model.session(), polyquant.load(LLAMA, cache=kind).session()
    plain.decoder._recordable = False
    for session in (recorded, plain):
        for token in tokens:
            session.feed([token])
        session.rewind(back)
    for token in rest:
        np.testing.assert_array_equal(recorded.feed([token]), plain.feed([token]))


@pytest.mark.parametrize("kind", KINDS)
def test_other_work_in_between(kind):
    """Batches, single layers and the numpy engine each leave the cache in the state that a recorded step needs."""
    model, plain_model = (polyquant.load(LLAMA, cache=kind) for _ in range(2))
    plain_model.decoder._recordable = False
    recorded, plain = model.session(), plain_model.session()
    tokens = iter(text(model, 400) * 2)
    for pieces in range(30):
        for n in (1, 1, 1, pieces % 5 + 1, 1):
            some = [next(tokens) for _ in range(n)]
            which = "numpy" if pieces % 3 == 1 and n == 1 else "native"
            with native.engine(which):
                np.testing.assert_array_equal(recorded.feed(some), plain.feed(some))
        if pieces % 7 == 3:
            for session in (recorded, plain):
                session.decoder.run_layer(0, np.ones((90, model.decoder.hyper.hidden), np.float32), session.cache)


def test_two_sessions_take_turns():
    model = polyquant.load(LLAMA)
    texts = [text(model, seed=i) for i in range(2)]
    expected = [walked(LLAMA, t) for t in texts]
    sessions = [model.session() for _ in texts]
    for i in range(LONG):
        for session, tokens, logits in zip(sessions, texts, expected, strict=True):
            np.testing.assert_array_equal(session.feed([tokens[i]]), logits[i])


def test_two_threads_and_a_different_thread_count():
    model = polyquant.load(LLAMA)
    texts = [text(model, seed=i) for i in range(2)]
    expected = [walked(LLAMA, t) for t in texts]
    found: list[np.ndarray] = [np.empty(0)] * 2
    sessions = [model.session() for _ in texts]
    half = LONG // 2
    first = [np.array([s.feed([t]) for t in tokens[:half]]) for s, tokens in zip(sessions, texts, strict=True)]
    before = native.threads()

    def go(i: int) -> None:
        found[i] = np.concatenate([first[i], [sessions[i].feed([t]) for t in texts[i][half:]]])

    running = [threading.Thread(target=go, args=(i,)) for i in range(2)]
    try:
        polyquant.load(LLAMA, threads=3)
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        native.set_threads(before)
    np.testing.assert_array_equal(found, expected)


class Interrupted:
    """A tape whose run is followed by Ctrl-C."""

    def __init__(self, tape) -> None:
        self.tape, self.room = tape, tape.room

    def run(self, position: int) -> None:
        self.tape.run(position)
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_step_can_be_repeated(kind):
    model = polyquant.load(LLAMA, cache=kind)
    tokens = text(model)
    expected = walked(LLAMA, tokens, cache=kind)
    session = model.session()
    for i, token in enumerate(tokens):
        step = session.cache.step
        if step is not None and session.position < step.tape.room:
            tape, step.tape = step.tape, Interrupted(step.tape)
            with pytest.raises(KeyboardInterrupt):
                session.feed([(token + 1) % model.vocab])
            step.tape = tape
            assert session.position == len(session.tokens) == i
        np.testing.assert_array_equal(session.feed([token]), expected[i])


def test_a_recording_that_fails_leaves_nothing_behind(monkeypatch):
    model = polyquant.load(LLAMA)
    session = model.session()
    session.feed([1, 2])
    with monkeypatch.context() as m:
        m.setattr(type(model.decoder.layers[0]), "__call__", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.feed([3])
    assert session.cache.step is None
    assert native.module().lent([1]) is None  # no tape records
    np.testing.assert_array_equal(session.feed([3]), walked(LLAMA, [1, 2, 3])[2])


def test_a_step_with_unrecorded_operations_is_not_replayed(walks):
    """Its result comes from memory that no recorded operation wrote."""
    model = polyquant.load(LLAMA)
    layer = model.decoder.layers[0]
    kept = layer.feed_forward.down
    layer.feed_forward.down = lambda x: kept(x * np.float32(2))
    session = model.session()
    for token in (1, 2, 3):
        session.feed([token])
        assert session.cache.step is None
    assert walks == [1, 1, 1]


def test_a_tape_refuses_invalid_use():
    model = polyquant.load(LLAMA)
    session = model.session()
    session.feed([1])
    tape = session.cache.step.tape
    assert tape.room == 32
    assert tape.nbytes < 64 << 10
    with pytest.raises(ValueError, match="cannot run"):
        tape.run(32)
    with tape, pytest.raises(RuntimeError, match="already recording"), native.module().Tape():
        pass


def test_the_result_of_a_step_belongs_to_the_caller():
    session = polyquant.load(LLAMA).session()
    decoder = session.decoder
    states = [decoder.hidden(np.array([t]), session.cache) for t in (1, 2, 3)]
    copies = [s.copy() for s in states]
    decoder.hidden(np.array([4]), session.cache)
    np.testing.assert_array_equal(states, copies)


def test_add_is_checked():
    lib = native.module()
    x, out = np.ones((2, 3), np.float32), np.empty((2, 3), np.float32)
    np.testing.assert_array_equal(add(x[:, ::1], x), x + x)
    for y in (np.ones((2, 4), np.float32), np.ones((3, 2), np.float32)):
        with pytest.raises(ValueError, match="shape"):
            lib.add(x, y, out)
    with pytest.raises(ValueError, match="bias"):
        lib.add_bias(out, np.ones(4, np.float32))
    with pytest.raises(ValueError, match="contiguous"):
        lib.add_bias(np.ones((4, 6), np.float32)[:, ::2], np.ones(3, np.float32))
