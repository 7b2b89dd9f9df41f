"""Hessians are collected stage by stage, requested once each, and discarded."""

import threading

import numpy as np
import pytest

from polyquant.calibration.hessians import LEAST_INPUTS, Hessians, Moments


class Model:
    """Two stages of two tensors; the second tensor of the last sees few inputs."""

    names = (("a", "b"), ("c", "d"))

    def __init__(self):
        self.runs = []

    def expect(self, requests):
        pass

    def run(self, index, wanted, tick):
        self.runs.append((index, wanted))
        out = {}
        for name in self.names[index]:
            if name in wanted:
                out[name] = Moments(3)
                out[name].add(np.full((4 if name == "d" else LEAST_INPUTS, 3), index + 1, np.float32))
        tick(0.5)
        tick(1)
        return out


def test_moments_are_means_of_products():
    x = np.random.default_rng(0).standard_normal((50, 6)).astype(np.float32)
    moments = Moments(6)
    moments.add(x[:20])
    moments.add(x[20:])
    np.testing.assert_allclose(moments.hessian, x.T @ x / 50, rtol=1e-5)
    assert moments.count == 50


def test_stages_run_when_they_are_needed_and_once():
    model, told = Model(), []
    hessians = Hessians(model, "abc", told.append)
    assert model.runs == []
    found, why = hessians.of("a")
    assert not why
    np.testing.assert_array_equal(found, np.ones((3, 3)))
    assert [i for i, _ in model.runs] == [0]
    np.testing.assert_array_equal(hessians.of("c")[0], np.full((3, 3), 4))
    np.testing.assert_array_equal(hessians.of("b")[0], np.ones((3, 3)))
    assert [i for i, _ in model.runs] == [0, 1]
    assert told == [0.25, 0.5, 0.75, 1]
    with pytest.raises(KeyError):
        hessians.of("a")


def test_unseen_inputs_are_reported():
    hessians = Hessians(Model(), "aed")
    assert hessians.of("e") == (None, "not calibrated: the model gives it no inputs")
    assert hessians.of("d") == (None, f"not calibrated: 4 inputs seen, fewer than {LEAST_INPUTS}")
    assert hessians.order("a") < hessians.order("d") < hessians.order("e")


def test_concurrent_threads_share_one_run():
    names = [f"{i:02}" for i in range(40)]

    class Wide(Model):
        pass

    Wide.names = tuple((n,) for n in names)
    model, found = Wide(), {}
    hessians = Hessians(model, names)
    threads = [threading.Thread(target=lambda n=n: found.update({n: hessians.of(n)[0]})) for n in reversed(names)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [i for i, _ in model.runs] == list(range(40))
    assert all(found[n][0, 0] == (i + 1) ** 2 for i, n in enumerate(names))


def test_calibration_can_be_stopped():
    def stop(share):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        Hessians(Model(), "a", stop).of("a")
