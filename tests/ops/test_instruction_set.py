"""POLYQUANT_ISA forces the kernels of one instruction set, or fails with one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS
from polyquant.ops import native

SAY = """
from polyquant.ops import native
print(native.instruction_set(), native.available() and native.module().kernel_set())
"""


def said(isa: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "POLYQUANT_ISA": isa}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not native.available(), reason="no native kernels here")
@pytest.mark.parametrize(("isa", "name"), [item for item in native._ISAS.items() if item[0] != "numpy"])
def test_kernels_of_an_instruction_set(isa: str, name: str) -> None:
    try:
        assert native._forced(isa) == isa
    except pq.InputError as problem:
        assert f"POLYQUANT_ISA={isa} is not possible here" in str(problem)
        pytest.skip("this processor lacks it")
    else:
        assert native.module().kernel_set() == name
    finally:
        native.module().use_kernels("")


def test_the_environment_decides() -> None:
    assert said("numpy", "-c", SAY).stdout.startswith("numpy ")
    if native.available():
        assert said("plain", "-c", SAY).stdout == "plain plain\n"


def test_unknown_names_are_one_line() -> None:
    assert native._forced(None) is None
    assert native._forced("") is None
    done = said("sse9", "-m", "polyquant", "doctor")
    assert done.returncode == 2
    assert done.stderr == (
        "polyquant: POLYQUANT_ISA names no instruction set "
        "(expected amx, avx512, avxvnni, avx2, i8mm, dotprod, neon, plain, numpy, found sse9)\n"
    )


LOGITS = """
import sys, numpy as np, polyquant
model = polyquant.load(sys.argv[1])
tokens = np.arange(1, 25)
rows = [model.session().feed(tokens[:n]) for n in (1, 3, 24)]  # the kernels of one, few and many tokens
np.save(sys.argv[2], rows)
"""


@pytest.mark.skipif(not native.available(), reason="no native kernels here")
@pytest.mark.parametrize("isa", native._ISAS)
@pytest.mark.parametrize("model", ["tiny-llama-tied-Q4_0", "tiny-llama-untied-Q4_K_M"])
def test_models_run_with_each_instruction_set(isa: str, model: str, tmp_path: Path) -> None:
    """In a process of its own; the fixture `kernels` runs the tests of products with each set in this one."""
    file = VECTORS / "models" / model.rpartition("-Q4")[0] / f"{model}.gguf"
    done = said(isa, "-c", LOGITS, file, tmp_path / "logits.npy")
    if "is not possible here" in done.stderr:
        pytest.skip("this processor lacks it")
    assert done.returncode == 0, done.stderr
    expected = [pq.load(file).session().feed(np.arange(1, 25)[:n]) for n in (1, 3, 24)]
    scale = np.abs(expected).max()
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), expected, atol=0.03 * scale)  # inputs are rounded
