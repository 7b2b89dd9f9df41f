"""Activation ranges of a model, sample by sample."""

import numpy as np
import pytest

from polyquant.calibration.statistics import CacheRanges, InputRanges
from polyquant.errors import InputError


def gathered():
    ranges = InputRanges(2)
    ranges.add(np.array([[1, -2], [3, 0]], np.float32))
    ranges.add(np.array([[-1, 10]], np.float32))
    ranges.add(np.empty((0, 2), np.float32))
    return ranges


def test_ranges_over_samples_and_their_means():
    ranges = gathered()
    np.testing.assert_array_equal(ranges.extremes, ([-1, -2], [3, 10]))
    np.testing.assert_allclose(ranges.mean, [1, 8 / 3])
    assert ranges.range(None, None, mean=False) == (-2, 10)
    assert ranges.range(None, None, mean=True) == (-1.5, 6.5)


def test_ranges_of_scaled_and_shifted_inputs_equal_recomputed_ones():
    rng = np.random.default_rng(0)
    samples = [rng.standard_normal((9, 5)).astype(np.float32) for _ in range(3)]
    scale, shift = rng.uniform(0.5, 2, 5).astype(np.float32), rng.standard_normal(5).astype(np.float32)
    plain, moved = InputRanges(5), InputRanges(5)
    for x in samples:
        plain.add(x)
        moved.add((x - shift) / scale)
    for mean in (False, True):
        np.testing.assert_allclose(plain.range(scale, shift, mean=mean), moved.range(None, None, mean=mean), rtol=1e-6)


def test_unseen_or_non_finite_ranges_are_refused():
    with pytest.raises(InputError, match="no inputs seen"):
        InputRanges(3).range(None, None, mean=True)
    broken = InputRanges(1)
    broken.add(np.array([[np.inf]], np.float32))
    with pytest.raises(InputError, match="not finite"):
        broken.range(None, None, mean=False)
    with pytest.raises(InputError, match="filled no cache"):
        CacheRanges(before=True).keys  # noqa: B018


def test_cache_channels_are_the_last_axes():
    ranges = CacheRanges(before=False)
    ranges.add(np.arange(12).reshape(3, 2, 2), -np.arange(6).reshape(3, 2))
    ranges.add(np.full((1, 2, 2), 99), np.full((1, 2), 99))
    np.testing.assert_array_equal(ranges.keys, ([0, 1, 2, 3], [99] * 4))
    np.testing.assert_array_equal(ranges.values, ([-4, -5], [99, 99]))
