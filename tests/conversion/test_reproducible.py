"""The same input and recipe give the same bytes: for 1 and 2 threads, native and numpy, and on other processors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyquant.ops import native

PROGRAM = Path(__file__).with_name("conversions.py")
OLDER = {
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4",
    "PYTHONWARNINGS": "ignore",  # about features that this processor or this numpy lacks anyway
}
"""numpy and its BLAS run as on a processor with AVX2 but without AVX-512."""

TRELLIS = ("slow", "slow calibrated")


def digests(threads: int, *groups: str, **environment: str) -> dict[str, str]:
    command = [sys.executable, PROGRAM, str(threads), *groups]
    done = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True, timeout=600
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def wanted():
    return digests(2, "plain", *TRELLIS, "calibrated", OPENBLAS_NUM_THREADS="1")


def test_one_thread_gives_the_same_bytes(wanted):
    assert digests(1, "plain", *TRELLIS, "calibrated", OPENBLAS_NUM_THREADS="1") == wanted


def same(found: dict[str, str], wanted: dict[str, str]) -> None:
    assert found and found == {name: wanted[name] for name in found}


def test_an_older_processor_and_more_blas_threads_give_the_same_bytes(wanted):
    same(digests(2, "plain", *TRELLIS, "calibrated", OPENBLAS_NUM_THREADS="2", **OLDER), wanted)


def test_another_blas_gives_the_same_bytes(wanted):
    """Nehalem's kernels have no fused multiply-add."""
    same(digests(1, "calibrated", "slow calibrated", OPENBLAS_CORETYPE="Nehalem"), wanted)


@pytest.mark.skipif(not native.available(), reason="native kernels are not built")
def test_numpy_gives_the_same_bytes(wanted):
    """So every instruction set does: each is compared with numpy on the processors that run this test."""
    same(digests(2, "plain", POLYQUANT_NATIVE="0"), wanted)


@pytest.mark.skipif(not native.available(), reason="native kernels are not built")
def test_numpy_gives_the_same_calibrated_bytes(wanted):
    same(digests(2, "calibrated", POLYQUANT_NATIVE="0"), wanted)


@pytest.mark.slow
@pytest.mark.skipif(not native.available(), reason="native kernels are not built")
def test_numpy_gives_the_same_trellis_codes(wanted):
    same(digests(2, *TRELLIS, POLYQUANT_NATIVE="0"), wanted)
