from __future__ import annotations

import numpy as np
import pytest

from golden import VECTORS
from polyquant.analysis import speed
from polyquant.analysis.sweep import forecast, run
from polyquant.conversion.speed import REFERENCE
from sweep import inline

SOURCE = VECTORS / "models/tiny-llama-untied/hf"


def quick(patch):
    """Run steps in this process, and measure speeds once."""
    patch.setattr(run, "run_child", inline.run_inline)
    patch.setattr(speed, "_REPEATS", 1)
    patch.setattr(speed, "_LEAST", 0.0)
    patch.setattr(forecast, "measure_speed", lambda steps: REFERENCE)


@pytest.fixture
def calls(monkeypatch):
    """Steps run in this process, and are listed here."""
    quick(monkeypatch)
    inline.CALLS.clear()
    return inline.CALLS


@pytest.fixture(scope="session")
def book(tmp_path_factory):
    """An evaluation text of 500 words."""
    words = np.random.default_rng(5).choice(["the", "fox", "dog", "quick", "brown", "jumps", "over", "lazy"], 500)
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(" ".join(words))
    return path
