"""The next token: against definitions written out with a full sort."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyquant.errors import InputError
from polyquant.runtime.sampling import Sampler, Sampling, log_probabilities, log_probability


def logits_of(seed: int, size: int, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def kept_by_definition(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> tuple[set[int], set[int]]:
    """Ids that must and may be drawn: top-p's edge may fall one token earlier or later, by rounding."""
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    p = np.exp(logits[order].astype(np.float64) - logits.max())
    p /= p.sum()
    n = int(np.searchsorted(np.cumsum(p), top_p)) + 1 if top_p < 1 else len(order)
    likely = p >= min_p * p[0] * (1 + 1e-6)
    may = p >= min_p * p[0] * (1 - 1e-6)
    return set(order[: max(1, n - 1)][likely[: max(1, n - 1)]].tolist()), set(order[: n + 1][may[: n + 1]].tolist())


def drawn(logits: np.ndarray, times: int, **options: float) -> list[int]:
    sampler = Sampler(Sampling(seed=1, **options))
    return [sampler.pick(logits, []) for _ in range(times)]


@given(
    seed=st.integers(0, 99),
    size=st.sampled_from([1, 2, 7, 300, 1000, 5000, 70_000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 8.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 3000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 0.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
@settings(max_examples=150, deadline=None)
def test_only_tokens_within_the_limits_are_sampled(seed, size, spread, top_k, top_p, min_p):
    logits = logits_of(seed, size, spread)
    _, may = kept_by_definition(logits, top_k, top_p, min_p)
    assert set(drawn(logits, 20, temperature=2.0, top_k=top_k, top_p=top_p, min_p=min_p)) <= may


@pytest.mark.parametrize(
    "options", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.8, "min_p": 0.02}, {}], ids=str
)
def test_every_remaining_token_is_sampled_sometimes(options):
    logits = logits_of(3, 60, 1.0)
    must, may = kept_by_definition(logits, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **options})
    assert must <= set(drawn(logits, 4000, temperature=5.0, **options)) <= may


@pytest.mark.parametrize("size", [8, 2000])
def test_token_frequencies_match_probabilities(size):
    logits = np.full(size, -20, np.float32)
    wanted = {size - 1: 0.5, 0: 0.25, size // 2: 0.25}
    for i, p in wanted.items():
        logits[i] = 2 * math.log(p)  # temperature 2 makes it log p
    found = drawn(logits, 4000, temperature=2.0, top_k=3)
    assert all(abs(found.count(i) / 4000 - p) < 0.04 for i, p in wanted.items())
    found = drawn(logits, 4000, temperature=2.0)
    assert abs(found.count(size - 1) / found.count(0) - 2) < 0.3


def test_temperature_is_applied_after_the_limits():
    logits = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    assert set(drawn(logits, 500, temperature=100.0, top_p=0.8)) == {0, 1}
    assert set(drawn(logits, 500, temperature=100.0, min_p=0.4)) == {0, 1}
    assert set(drawn(logits, 500, temperature=1e-3)) == {0} == set(drawn(logits, 9, temperature=1e-300))


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 0.0}], ids=str)
def test_ties_give_the_lowest_id(options):
    logits = np.zeros(1000, np.float32)
    logits[[200, 7, 900]] = 5
    assert drawn(logits, 3, **options) == [7] * 3
    assert set(drawn(logits, 200, temperature=1.0, top_k=2)) == {7, 200}


def test_equal_seeds_give_equal_tokens():
    logits = logits_of(0, 500)
    first, second = (Sampler(Sampling(temperature=1.0, seed=7)) for _ in range(2))
    assert [first.pick(logits, []) for _ in range(50)] == [second.pick(logits, []) for _ in range(50)]
    other, unseeded = Sampler(Sampling(temperature=1.0, seed=8)), Sampler(Sampling(temperature=1.0))
    runs = {tuple(s.pick(logits, []) for _ in range(50)) for s in (first, other, unseeded)}
    assert len(runs) == 3


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_once():
    logits = np.array([3.0, 2.9, -1.0, -1.1], np.float32)
    before = logits.copy()

    def first(history, **options):
        return Sampler(Sampling(repetition_penalty=1.2, **options)).pick(logits, history)

    assert first([]) == 0 and first([0]) == 1 and first([0, 0, 0, 1]) == 0
    assert first([0, 2, 2], repetition_window=2) == 0  # token 0 is out of the window
    assert first([0, 2, 2], repetition_window=0) == 0
    assert Sampler(Sampling(repetition_penalty=1.2)).pick(logits[2:], [0]) == 1
    assert (logits == before).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 5}], ids=str)
def test_nan_logits_are_an_error(bad, options):
    logits = logits_of(0, 100)
    logits[50] = bad
    with pytest.raises(InputError, match="not finite"):
        Sampler(Sampling(**options)).pick(logits, [])
    with pytest.raises(InputError, match="not finite"):
        Sampler(Sampling(**options)).pick(np.full(10, -np.inf, np.float32), [])


def test_excluded_tokens_are_never_sampled():
    logits = np.full(3000, -np.inf, np.float32)
    logits[[5, 2999]] = [0.0, 1.0]
    for options in ({}, {"top_k": 40}, {"top_p": 0.99}, {"min_p": 0.01}):
        assert set(drawn(logits, 300, temperature=1.0, **options)) == {5, 2999}


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"), ("top_k", -1),
        ("top_k", 1.5),
     ("top_k", True), ("top_p", -0.1), ("top_p", 1.1), ("min_p", 2), ("repetition_penalty", 0),
     ("repetition_window", -1), ("seed", -1),
     ("seed", "x"), ("temperature", None)],
)  # fmt: skip
def test_values_out_of_range(name, value):
    with pytest.raises(InputError, match=f"{name} is out of range"):
        Sampling(**{name: value})


def test_log_probability_ignores_sampling():
    logits = logits_of(1, 200)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert all(abs(log_probability(logits, i) - exact[i]) < 1e-5 for i in (0, 100, int(logits.argmax())))


def test_frequency_and_presence_penalties_count_the_chosen_tokens():
    logits = np.array([3.0, 2.4, 2.0, -1.0], np.float32)

    def picks(**options):
        sampler = Sampler(Sampling(**options))
        return [sampler.pick(logits, [0, 0, 0]) for _ in range(5)]

    assert picks() == [0] * 5  # tokens of the prompt are not counted
    assert picks(presence_penalty=0.7) == [0, 1, 0, 0, 0]
    assert picks(frequency_penalty=0.7) == [0, 1, 0, 2, 1]
    assert picks(presence_penalty=-1.0) == [0] * 5
    assert logits.tolist() == [3.0, 2.4000000953674316, 2.0, -1.0]


def test_biases_are_added_to_logits():
    logits = np.array([3.0, 2.4, 2.0, -1.0], np.float32)
    assert drawn(logits, 2, logit_bias={3: 5.0}) == [3, 3]
    assert drawn(logits, 2, logit_bias={0: -100.0, 2: 0.5}) == [2, 2]
    assert set(drawn(logits, 50, temperature=1.0, logit_bias={0: -100.0, 1: -100.0})) == {2, 3}


class Even:
    """Allows even tokens only."""

    def __init__(self):
        self.accepted = []

    def allowed(self):
        return np.arange(1000) % 2 == 0

    def accept(self, token):
        self.accepted.append(token)


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0}, {"temperature": 2.0, "top_k": 7, "top_p": 0.9}], ids=str)
def test_constraints_exclude_tokens(options):
    even = Even()
    sampler = Sampler(Sampling(seed=2, **options), even)
    picks = [sampler.pick(logits_of(i, 1000), []) for i in range(20)]
    assert picks == even.accepted and not any(p % 2 for p in picks)
    with pytest.raises(InputError, match="not finite"):
        sampler.pick(np.full(1000, np.nan, np.float32), [])


@pytest.mark.parametrize("bias", [{-1: 1.0}, {"5": 1.0}, {5: math.nan}, {5: "x"}], ids=str)
def test_invalid_biases(bias):
    with pytest.raises(InputError, match="logit_bias is out of range"):
        Sampling(logit_bias=bias)


def test_log_probabilities_are_those_of_the_most_likely_tokens():
    logits = logits_of(4, 3000)
    found = log_probabilities(logits, 5)
    order = np.argsort(-logits, kind="stable")[:5]
    assert [i for i, _ in found] == order.tolist()
    np.testing.assert_allclose([p for _, p in found], [log_probability(logits, int(i)) for i in order])
    assert len(log_probabilities(logits[:3], 5)) == 3
