"""The figures of smoothing."""

import numpy as np

from polyquant.quantizers.smooth import LEAST, shared_by_heads, smoothing_scale


def test_scale_is_the_ratio_of_powers_and_never_too_small():
    x, w = np.array([4, 1, 0], np.float32), np.array([1, 4, 0], np.float32)
    np.testing.assert_allclose(smoothing_scale(x, w, 0.5), [2, 0.5, LEAST])
    np.testing.assert_allclose(smoothing_scale(x, w, 0.9)[0], 4**0.9, rtol=1e-6)
    assert smoothing_scale(np.array([1], np.float32), np.array([0], np.float32), 0.5) == LEAST**-0.5


def test_heads_that_share_values_use_their_mean():
    scale = np.arange(8, dtype=np.float32)  # four query heads of size two, two for each value head
    spread, values = shared_by_heads(scale, 2, 2)
    np.testing.assert_array_equal(values, [1, 2, 5, 6])
    np.testing.assert_array_equal(spread, [1, 2, 1, 2, 5, 6, 5, 6])
