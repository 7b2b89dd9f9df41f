"""The fixture `kernels`: a test runs once with the kernels of each instruction set that the machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from polyquant.ops import native


def _restore() -> None:
    if native._forced(os.environ.get("POLYQUANT_ISA")) is None:
        native.module().use_kernels("")


def _possible() -> list[str]:
    """The sets of this machine; one, to skip its tests, without native kernels."""
    if not native.available():
        return ["plain"]
    possible = [isa for isa in native._ISAS if native.module().use_kernels(isa)]
    _restore()
    return possible


@pytest.fixture(params=_possible())
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """The products of packed weights use the kernels of one instruction set, those of POLYQUANT_ISA."""
    if not native.available():
        pytest.skip("no native kernels here")
    assert native.module().use_kernels(request.param)
    yield request.param
    _restore()
