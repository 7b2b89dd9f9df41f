"""The fixture `kernels`: a test runs once with the kernels of each instruction set that the machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from polyquant.errors import InputError
from polyquant.ops import native


@pytest.fixture(params=[isa for isa in native._ISAS if isa != "numpy"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """The products of packed weights use the kernels of one instruction set, those of POLYQUANT_ISA."""
    if not native.available():
        pytest.skip("no native kernels here")
    try:
        native._forced(request.param)
    except InputError:
        pytest.skip("this processor lacks the instructions")
    else:
        yield request.param
    finally:
        native.module().use_kernels("")
        native._forced(os.environ.get("POLYQUANT_ISA"))
