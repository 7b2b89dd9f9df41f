"""Fixtures of the tests with a local server: no waiting between attempts, nothing remembered from another test."""

from __future__ import annotations

import pytest

from polyquant.storage import locations
from polyquant.storage.remote import ranges, retry


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_DELAY", 0.001)
    ranges.forget(lambda key: True)
    locations._made.clear()
