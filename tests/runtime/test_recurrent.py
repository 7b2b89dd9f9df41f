"""Sessions of recurrent models: split, rewound, aborted and restarted input gives the same logits."""

from __future__ import annotations

import numpy as np
import pytest

from architectures.golden_models import NAMES, Golden
from polyquant.architectures.find import of_config
from polyquant.errors import InputError
from polyquant.runtime.batch import Batch
from polyquant.runtime.generate import generate
from polyquant.runtime.kv_cache import KVCache
from polyquant.runtime.load import load
from polyquant.runtime.state import State, StateSpec

CLOSE = {"rtol": 0, "atol": 2e-4}
RECURRENT = [
    name for name in NAMES
    if (record := of_config(Golden(name).config)) is not None and record.runs
    and {key.name for key in record.hyper.keys} & {"ssm_conv", "short_conv"}
]  # fmt: skip


def text(model, tokens=100, seed=0):
    return np.random.default_rng(seed).integers(0, model.vocab, tokens).tolist()


@pytest.fixture(params=RECURRENT)
def model(request):
    return load(Golden(request.param).folder, activations="float")


@pytest.fixture
def lfm2():
    return load(Golden("lfm2").folder, activations="float")


def test_pieces_of_any_size(model):
    """64 tokens are a chunk of the scans of small models: pieces end before, at and after its boundary."""
    tokens = text(model, 150)
    whole = model.logits(tokens)
    for sizes in ([1] * 150, [63, 1, 65, 21], [64, 86], [2] * 75, [7] * 21 + [3]):
        session, ends = model.session(), np.cumsum(sizes).tolist()
        found = np.concatenate([session.feed_all(tokens[end - n : end]) for n, end in zip(sizes, ends, strict=True)])
        np.testing.assert_allclose(found, whole, **CLOSE)


@pytest.mark.parametrize("cache", ["f32", "f16", "int8"])
def test_after_a_rewind(model, cache):
    """After a mark only the following tokens are recomputed, before all marks the whole text."""
    model = load(model.checkpoint.path, activations="float", cache=cache)
    tokens, other = text(model), text(model, 20, seed=1)
    for back, again in ((99, 0), (90, 0), (95, 5), (70, 0), (89, 19), (40, 40), (0, 0)):
        session = model.session()
        session.feed(tokens[:70])
        session.feed(tokens[70:90])
        for token in tokens[90:]:
            session.feed([token])
        if back == 99:
            session.feed([3])
            session.rewind(100)
            np.testing.assert_array_equal(session.position, 100)
            continue
        assert session.rewind(back) == again
        assert session.position == back and session.tokens == tokens[:back]
        plain = model.session()
        wanted = plain.feed([*tokens[:back], *other]) if back else plain.feed(other)
        np.testing.assert_allclose(session.feed(other), wanted, rtol=0, atol=2e-4 if cache == "f32" else 0.3)


def test_a_known_prompt_is_not_recomputed(lfm2):
    session, prompt = lfm2.session(), text(lfm2, 60)
    first = lfm2.generate(prompt, max_tokens=9, session=session)
    answer = [token.id for token in first]
    wanted = [t.id for t in lfm2.generate([*prompt, *answer, 5, 6], max_tokens=9)]
    again = lfm2.generate([*prompt, *answer, 5, 6], max_tokens=9, session=session)
    assert [token.id for token in again] == wanted
    assert again.reused == 60 + 8  # the last token was given and not fed
    other = lfm2.generate([*prompt, 1, 2], max_tokens=9, session=session)
    assert [t.id for t in other] == [t.id for t in lfm2.generate([*prompt, 1, 2], max_tokens=9)]
    assert other.reused == 60  # back to the mark after the first prompt
    assert len(list(lfm2.generate(prompt, max_tokens=1, session=session))) == 1
    assert lfm2.generate(prompt, session=session).session.tokens == prompt


def test_a_batch_goes_back_to_a_mark(lfm2):
    batch, prompt = Batch(lfm2.decoder, lfm2.context, parallel=1, memory=1 << 30), text(lfm2, 300)
    other = [*prompt[:280], 7, 8]
    for ids, reused in ((prompt, 0), (prompt, 299), (other, 256)):
        job = batch.submit(generate(lfm2, ids, max_tokens=3))
        while batch.advance():
            pass
        assert job.generation.reused == reused
        assert [t.id for t in job.taken()] == [t.id for t in lfm2.generate(ids, max_tokens=3)]


def test_an_aborted_step_can_be_repeated(model, monkeypatch):
    tokens = text(model, 30)
    whole = model.logits(tokens)
    session = model.session()
    session.feed(tokens[:20])
    last = type(model.decoder.layers[-1])
    through, calls = last.__call__, []

    def broken(self, *rest):
        out = through(self, *rest)
        calls.append(self)
        if len(calls) == len(model.decoder.layers) - 1:  # some layers have seen the tokens, some not
            raise KeyboardInterrupt
        return out

    for n in (1, 4):
        calls.clear()
        with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
            m.setattr(last, "__call__", broken)
            session.feed([7] * n)
        assert session.position == len(session.tokens)
        found = session.feed(tokens[session.position : session.position + n])
        np.testing.assert_allclose(found, whole[session.position - 1], **CLOSE)


def test_a_single_layer_leaves_the_session_unchanged(model):
    tokens = text(model, 30)
    whole = model.logits(tokens)
    session = model.session()
    session.feed(tokens[:20])
    for index in range(len(model.decoder.layers)):
        model.decoder.run_layer(index, np.ones((3, model.hyper.hidden), np.float32), session.cache)
    np.testing.assert_allclose(session.feed_all(tokens[20:]), whole[20:], **CLOSE)


def test_a_state_belongs_to_one_position():
    state = State([(2, 3)])
    np.testing.assert_array_equal(state.read(0)[0], np.zeros((2, 3)))
    one, two = np.ones((2, 3), np.float32), np.full((2, 3), 2, np.float32)
    state.write(0, 4, (one,))
    state.write(4, 5, (two,))
    assert state.read(5)[0] is two and state.read(4)[0] is one and len(state.arrays) == 2
    with pytest.raises(InputError, match="no recurrent state for this position"):
        state.read(3)
    state.write(4, 6, (two,))
    with pytest.raises(InputError):
        state.read(5)


def test_positions_that_a_cache_can_rewind_to():
    for kind, places in (("f32", {39: 33, 33: 33, 32: 32, 20: 0}), ("int8", {39: 32, 33: 32, 32: 32, 20: 0})):
        cache = KVCache([StateSpec((1, 4)), StateSpec(states=((2,),))], kind)
        for at in (10, 32, 33, 40):
            cache.keep(1, at - cache.length, np.full(2, at, np.float32))
            cache.length = at
            if at < 40:
                cache.mark()
        assert {length: cache.reachable(length) for length in places} == places
        assert cache.reachable(40) == 40 and cache.recurrent
        rows = cache.layers[0].nbytes
        assert cache.nbytes - rows == 3 * 8  # at 40, at 33 (the one before and a mark) and at 32
        cache.truncate(39)
        assert cache.length == 33 and cache.recall(1)[0].tolist() == [33, 33]
        cache.truncate(5)
        assert cache.length == 0 and cache.recall(1)[0].tolist() == [0, 0]


def test_an_oversized_state_is_refused(monkeypatch):
    monkeypatch.setattr("polyquant.runtime.site._MOST", 100)
    with pytest.raises(InputError, match="cannot be right"):
        load(Golden("lfm2").folder)


def test_two_parts_of_one_layer_keep_separate_states():
    both = StateSpec((2, 4)) | StateSpec(states=((3,),))
    assert both == StateSpec((2, 4), ((3,),))
    with pytest.raises(ValueError, match="the same"):
        both | StateSpec((2, 4))
