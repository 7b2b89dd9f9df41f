"""Statistics of tensors: exact values, samples, invalid values, ternary codes."""

from __future__ import annotations

import math

import numpy as np
import pytest

import polyquant
from folders import safetensors_bytes
from golden import VECTORS
from polyquant.analysis.side import Reader, Side
from polyquant.analysis.statistics import BINS, median, sampled, statistics


def side_of(path, name):
    weight = polyquant.open(path)[name]
    return Side((weight,), weight.shape)


@pytest.fixture
def stored(tmp_path):
    """stored(array) -> the array as a side, read from a file."""

    def write(values):
        raw = np.ascontiguousarray(values, "<f4")
        path = tmp_path / "model.safetensors"
        path.write_bytes(safetensors_bytes({"w": ("F32", list(raw.shape), raw.tobytes())}))
        return side_of(path, "w")

    return write


def test_all_values(stored):
    w = np.random.default_rng(5).standard_normal((700, 1024)).astype(np.float32)
    w[3, :5], w[9, 0] = 0, 40
    found = statistics(stored(w), every=True)
    assert (found.values, found.total, found.is_sample, found.invalid) == (w.size, w.size, False, 0)
    assert (found.smallest, found.largest, found.zeros) == (w.min(), 40, (w == 0).mean())
    assert found.mean == pytest.approx(w.mean(dtype=np.float64), abs=1e-9)
    assert found.deviation == pytest.approx(w.std(dtype=np.float64), rel=1e-9)
    assert found.outliers == pytest.approx(1 / w.size) and len(found.counts) == BINS and sum(found.counts) == w.size
    assert found.counts[-1] >= 1 and found.codes is None


def test_a_sample_has_whole_rows_spread_evenly(stored):
    w = np.repeat(np.arange(2048, dtype=np.float32), 256).reshape(2048, 256)
    side = stored(w)
    rows = np.unique(sampled(Reader(side), side.shape))
    assert len(rows) == 1024 and rows[0] == 0 and rows[-1] == 2047 and np.diff(rows).max() <= 3
    found = statistics(side)
    assert found.is_sample and found.values == 1 << 18 and found.total == w.size
    assert found.largest == 2047 and found.mean == pytest.approx(w.mean(), rel=0.01)


def test_invalid_values_are_counted_and_left_out(stored):
    w = np.ones((8, 32), np.float32)
    w[0, :3] = np.nan, np.inf, -np.inf
    found = statistics(stored(w), every=True)
    assert (found.invalid, found.smallest, found.largest, found.mean) == (3, 1, 1, 1)
    assert sum(found.counts) == w.size - 3
    nothing = statistics(stored(np.full((2, 2), np.nan)))
    assert nothing.invalid == 4 and (nothing.mean, nothing.smallest, sum(nothing.counts)) == (0, 0, 0)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0, 4), (2, 3, 4)])
def test_shapes(stored, shape):
    found = statistics(stored(np.full(shape, 2.0)), every=True)
    assert found.values == found.total == int(np.prod(shape)) and sum(found.counts) == found.total


def test_histograms_with_a_common_edge(stored):
    w = np.random.default_rng(6).standard_normal((64, 64)).astype(np.float32)
    found = statistics(stored(w), edge=0.5)
    assert found.edge == 0.5 and found.counts[0] == (w < -0.5 + 1 / BINS).sum()


def test_progress_and_stopping(stored):
    side, told = stored(np.zeros((4096, 1024))), []
    statistics(side, every=True, on_rows=lambda done, total: told.append((done, total)))
    assert told == [(1024, 4096), (2048, 4096), (3072, 4096), (4096, 4096)]

    def stop(done, total):
        raise KeyError(done)

    with pytest.raises(KeyError, match="1024"):
        statistics(side, every=True, on_rows=stop)


def test_ternary_codes():
    path = VECTORS / "bitnet_gguf/tiny-bitnet-b158-i2_s-x86_128.gguf"
    name = "blk.0.attn_q.weight"
    weight = polyquant.open(path)[name]
    signs = np.sign(weight.dequantize())
    found = statistics(side_of(path, name))
    assert found.codes == tuple(int((signs == s).sum()) for s in (-1, 0, 1))


@pytest.mark.parametrize("values", [[3], [1, 4], [5, 1, 2], [[2, 1], [9, 4]], [1, np.nan, 2], [np.inf, -np.inf, 0]])
def test_the_median_is_that_of_numpy(values):
    np.testing.assert_equal(median(values), float(np.median(values)))


def test_nothing_has_no_median():
    assert math.isnan(median([]))
