"""A small job with workers and drivers killed at random and faulty storage; `python -m chaos.runs 300` for more."""

from __future__ import annotations

import pytest

from chaos.runs import main


@pytest.mark.slow
def test_bytes_are_those_of_one_process():
    pytest.importorskip("distributed")
    runs = main(30)
    assert not [r.wrong for r in runs if r.wrong]
    assert sum(r.workers for r in runs) > 10 and sum(r.drivers for r in runs) > 5
