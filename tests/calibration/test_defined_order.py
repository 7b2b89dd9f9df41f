"""The float model in calibration: native kernels and numpy give equal bits for every architecture, and almost those of
`run`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from polyquant import registry
from polyquant.architectures.find import by_name
from polyquant.calibration.hessians import Moments
from polyquant.calibration.stages import DecoderStages
from polyquant.ops import native
from polyquant.ops.arithmetic import defined_order
from polyquant.runtime.load import load
from polyquant.testing.architectures import tiny_model

WINDOWS = [np.arange(length) * step % 32 for length, step in ((70, 7), (50, 11))]


@cache
def decoders() -> list[str]:
    records = {name: by_name(name) for name in registry.ARCHITECTURES}
    return [name for name, record in records.items() if record is not None and not record.encoder]


def states(folder: Path) -> list[bytes]:
    """Bytes of all Hessians, stage by stage."""
    stages = DecoderStages(load(folder, activations="float"), WINDOWS)
    out = []
    for index, names in enumerate(stages.names):
        seen: dict[str, Moments] = dict(stages.run(index, frozenset(names), lambda _: None))
        out += [seen[name].hessian.tobytes() for name in sorted(seen)]
    return out


@pytest.mark.parametrize("name", decoders())
def test_both_engines_give_equal_bits(name, tmp_path):
    record = by_name(name)
    assert record is not None
    folder = tiny_model(record, tmp_path / "model")
    found = states(folder)
    assert found
    with native.engine("numpy"):
        assert states(folder) == found
    decoder = load(folder, activations="float").decoder
    fast = list(decoder.states(WINDOWS[0], decoder.cache()))[-1]
    with defined_order():
        slow = list(decoder.states(WINDOWS[0], decoder.cache()))[-1]
    assert np.abs(fast - slow).max() < 1e-3 * np.abs(fast).max()
