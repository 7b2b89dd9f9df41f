"""Prompt lookup: the answers of single steps, drafts where they pay, and no loss where they do not."""

from __future__ import annotations

import numpy as np
import pytest

from architectures.golden_models import NAMES, Golden
from polyquant.analysis.demo import demo_model
from polyquant.architectures.find import of_config
from polyquant.errors import InputError
from polyquant.ops import native
from polyquant.runtime import prompt_lookup
from polyquant.runtime.batch import Batch
from polyquant.runtime.generate import generate
from polyquant.runtime.load import load
from polyquant.runtime.prompt_lookup import EXACT, LONGEST, PassTimes, PromptLookup, rows_agree
from polyquant.runtime.sampling import Sampling

PROMPT = "and he reigned in the house of the king of Judah, and he reigned in the house of"
RECORDS = {name: of_config(Golden(name).config) for name in NAMES}
RUN = [name for name, record in RECORDS.items() if record is not None and record.runs and not record.encoder]
needs_kernels = pytest.mark.skipif(not native.available(), reason="BLAS sums depend on the number of rows")


@pytest.fixture(scope="module")
def model():
    return load(demo_model("llama"))


@pytest.fixture
def eager(monkeypatch):
    """Passes of several tokens seem to cost little, so that there are many drafts."""
    monkeypatch.setattr(PassTimes, "steps", lambda self, tokens: 1 + 0.01 * (tokens - 1))


def answered(model, **options):
    """All that an answer consists of, and its drafts."""
    generation = generate(model, PROMPT, **options)
    tokens = [(t.id, t.text, t.logprob, tuple(t.top)) for t in generation]
    found = tokens, generation.finish, generation.generated, generation.session.tokens, generation.session.position
    return found, generation.lookup


class Even:
    """Allows even tokens."""

    def __init__(self, vocab):
        self.mask = np.arange(vocab) % 2 == 0

    def allowed(self):
        return self.mask

    def accept(self, token):
        assert token % 2 == 0


# ---------------------------------------------------------------- the answers


@needs_kernels
@pytest.mark.parametrize("cache", ["f32", "f16", "int8"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampling": Sampling(0.7, top_k=20, seed=4), "top": 2},
        {"sampling": Sampling(0.0, repetition_penalty=1.1)},
        {"sampling": Sampling(0.3, frequency_penalty=0.2, seed=1)},
        {"stop": "Judah,"},
        {"max_tokens": 2},
        {"constraint": Even(2048)},
    ],
    ids=lambda options: next(iter(options), "greedy"),
)
def test_answers_are_those_of_single_steps(cache, options, eager):
    model = load(demo_model("llama"), cache=cache)
    options = {"max_tokens": 90, **options}
    expected, none = answered(model, **options)
    found, lookup = answered(model, prompt_lookup=EXACT, **options)
    assert none is None and lookup is not None and lookup.exact
    assert found == expected
    if options["max_tokens"] == 90 and not isinstance(options.get("constraint"), Even):
        assert lookup.drafted > 3


@needs_kernels
@pytest.mark.parametrize("name", RUN)
def test_a_pass_has_the_bits_of_single_steps(name):
    model = load(Golden(name).folder)
    tokens = np.random.default_rng(3).integers(0, model.vocab, 12).tolist()
    single, together = model.session(), model.session()
    if single.cache.recurrent:
        assert "recurrent" in str(single.lookup_problem(EXACT)) and single.passable(4) == 1
        return
    assert model.decoder.exact_passes
    expected = np.stack([single.feed([token]) for token in tokens])
    found = np.concatenate([together.verify(tokens[a : a + 4], stepwise=True) for a in (0, 4, 8)])
    np.testing.assert_array_equal(found, expected)
    assert together.tokens == single.tokens and together.position == single.position


@needs_kernels
@pytest.mark.parametrize("cache", ["f32", "int8"])
def test_dropped_drafts_leave_no_trace(model, cache):
    """The recorded step of one token goes on after them, at every place of a block of the cache."""
    model = load(demo_model("llama"), cache=cache)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.vocab, 70).tolist()
    plain, drafted = model.session(), model.session()
    for token in tokens:
        count = drafted.passable(4)
        assert 1 <= count <= 4
        if count > 1:
            drafted.verify([token, *rng.integers(0, model.vocab, count - 1).tolist()], stepwise=True)
            drafted.rewind(len(plain.tokens))
        np.testing.assert_array_equal(drafted.feed([token]), plain.feed([token]))
    if cache == "f32":
        step = drafted.cache.step
        drafted.verify(tokens[:3], stepwise=True)
        drafted.rewind(70)
        assert step is not None and drafted.cache.step is step


def test_more_drafts_agree_up_to_near_ties(model, eager):
    """A token that is not the one of single steps is about as likely: both logits, within rounding."""
    (expected, *_), _ = answered(model, max_tokens=120)
    (found, *_), lookup = answered(model, max_tokens=120, prompt_lookup=LONGEST)
    assert not lookup.exact and lookup.accepted > 20
    pairs = list(zip(expected, found, strict=False))
    same = next((i for i, (a, b) in enumerate(pairs) if a[0] != b[0]), len(pairs))
    assert all(abs(a[2] - b[2]) < 0.05 for a, b in pairs[:same])
    assert same == len(pairs) or abs(pairs[same][0][2] - pairs[same][1][2]) < 0.05


@needs_kernels
def test_a_batch_drafts_while_one_answer_is_alone(model, eager):
    options = {"max_tokens": 60, "prompt_lookup": EXACT}
    expected = "".join(t.text for t in generate(model, PROMPT, max_tokens=60))
    batch = Batch(model.decoder, model.context, parallel=2, memory=1 << 30)
    job = batch.submit(generate(model, PROMPT, **options))
    while batch.advance():
        pass
    assert "".join(t.text for t in job.taken()) == expected
    assert job.generation.lookup is not None and job.generation.lookup.passes > 3
    two = [batch.submit(generate(model, prompt, **options)) for prompt in (PROMPT, "Now these are")]
    while any(job.token is None for job in two):
        batch.advance()
    before = [job.generation.lookup.drafted for job in two]
    for _ in range(5):
        batch.advance()
    assert [job.generation.lookup.drafted for job in two] == before


@pytest.mark.parametrize("value", [-1, LONGEST + 1, 1.0, True])
def test_invalid_numbers_of_drafts(model, value):
    with pytest.raises(InputError, match="prompt_lookup is out of range"):
        model.generate(PROMPT, prompt_lookup=value)


class Rounded:
    """A linear whose products of several rows differ by one bit."""

    rounding, kernel = "block", "packed"

    def __init__(self, linear, wrong):
        self.linear, self.weights, self.wrong = linear, linear.weights, wrong

    def __call__(self, x):
        (y,) = self.linear(x)
        if self.wrong and len(x) == 3:
            y[2, 1] = np.nextafter(y[2, 1], np.float32(np.inf))
        return [y]


@needs_kernels
def test_products_of_other_bits_are_noticed(model, monkeypatch):
    head = model.decoder.head
    assert rows_agree([Rounded(head, wrong=False)])
    assert not rows_agree([head, Rounded(head, wrong=True)])
    monkeypatch.setitem(model.decoder.__dict__, "exact_passes", False)
    session = model.session()
    assert "differ in the last bits" in str(session.lookup_problem(EXACT))
    assert session.lookup_problem(EXACT + 1) is None
    assert generate(model, PROMPT, prompt_lookup=EXACT).lookup is None
    assert generate(model, PROMPT, prompt_lookup=EXACT + 1).lookup is not None


# ---------------------------------------------------------------- the drafts


def speed(prompt, answer, most, costs):
    """Tokens per single step of a given answer, with passes of these costs by number of tokens."""
    lookup, history, spent, i = PromptLookup(most, PassTimes()), [*prompt, answer[0]], 0.0, 1
    while i < len(answer):
        drafts = lookup.draft(history, len(answer) - i - 1)
        spent += (cost := float(np.interp(1 + len(drafts), *costs)))
        right = prompt_lookup_matches(drafts, answer[i:])
        history += answer[i : i + right + 1]
        i += right + 1
        lookup.add(len(drafts), right, cost)
    return (len(answer) - 1) / spent


def prompt_lookup_matches(drafts, answer):
    return next((i for i, (a, b) in enumerate(zip(drafts, answer, strict=False)) if a != b), len(drafts))


CHEAP = [1, 4], [1, 1.15]
DEAR = [1, 2, 4, 8, 16, 32], [1, 1.4, 2.1, 3.0, 4.9, 9.6]


def test_speed_follows_the_text():
    """Copies gain, and no text loses more than two percent, whatever passes cost."""
    rng = np.random.default_rng(1)
    text = rng.integers(0, 2000, 300).tolist()
    edited = [int(rng.integers(2000)) if i % 24 == 12 else token for i, token in enumerate(text)]
    shuffled = [x for k in range(200) for x in (k % 7, 7 + k % 11, int(rng.integers(100, 2000)))]  # pairs recur
    noise = rng.integers(0, 40, 600).tolist()
    assert speed(text, text, 3, CHEAP) > 3 and speed(text, edited, 3, CHEAP) > 2.5
    assert speed(text, text, 15, DEAR) > 2.5 and speed(text, edited, 15, DEAR) > 2.5
    for most in (3, 15):
        for costs in (CHEAP, DEAR, ([1, 2, 4, 32], [1, 3, 4, 10])):
            for other in (shuffled, noise):
                for length in (128, 400):
                    assert speed(other[:200], other[200 : 200 + length], most, costs) >= 0.98


def test_drafts_follow_the_last_match_and_repetitions():
    times = PassTimes()
    times.add(1, 1.0)
    for tokens in (2, 4, 8):
        times.add(tokens, 1.01)
    lookup = PromptLookup(7, times)
    assert lookup.draft([1, 2, 3, 4, 5, 9, 1, 2, 3, 7, 8, 6, 1, 2, 3], 3) == [7, 8, 6]
    assert lookup.draft([1, 2, 3, 4, 5, 9, 1, 2, 3, 7, 8, 6, 1, 2, 3], 0) == []
    assert PromptLookup(7, times).draft([5, 6, 5, 6, 5, 6], 7) == [5, 6, 5, 6, 5, 6, 5]
    assert PromptLookup(7, times).draft([1, 2, 3, 4], 7) == []
    assert PromptLookup(7, PassTimes()).draft([5, 6, 5, 6, 5, 6], 7) == []  # no step was measured


def test_times_of_passes():
    times = PassTimes()
    assert times.steps(4) is None
    times.add(1, 0.1)
    assert times.steps(1) == 1 and times.steps(4) == prompt_lookup._usual(4)
    times.add(4, 0.3)
    assert times.steps(4) == pytest.approx(3)
    assert times.steps(5) == pytest.approx(3 * prompt_lookup._usual(5) / prompt_lookup._usual(4))
    times.add(4, 100.0)  # interrupted
    assert times.steps(4) < 5
