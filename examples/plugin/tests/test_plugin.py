"""Contract checks of polyquant.testing for this package, which must be installed."""

from pathlib import Path

import numpy as np
import pytest

import polyquant
from polyquant.errors import PlanError
from polyquant.testing.architectures import check_model, check_record, tiny_model
from polyquant.testing.codecs import check_codec, check_dequantize, check_registered
from polyquant.testing.formats import check_format, check_target
from polyquant_example.architecture import RECORD
from polyquant_example.codec import Q6
from polyquant_example.format import EXAMPLE


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny float model of this architecture in a Hugging Face folder."""
    return tiny_model(RECORD, tmp_path / "hf")


@pytest.fixture
def sample(model: Path, tmp_path: Path) -> Path:
    """The same model in this format, with this codec."""
    polyquant.convert(model, tmp_path / "sample.pqx", to="example", codec="example.q6")
    return tmp_path / "sample.pqx"


def test_codec() -> None:
    weight = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    check_codec(Q6, weight, error=1e-3, weighted=True)
    check_registered(Q6)


def test_golden_bytes() -> None:
    """Codes 1, 2, 3, 4 repeated, scale 0.5."""
    group = (1 | 2 << 6 | 3 << 12 | 4 << 18).to_bytes(3, "little")
    block = np.float16(0.5).tobytes() + 8 * group
    floats = np.tile(np.array([-15.5, -15.0, -14.5, -14.0], np.float32), 8)
    rows = np.tile(np.frombuffer(block, np.uint8), (4, 1))
    check_dequantize(Q6, rows, np.tile(floats, (4, 1)))


def test_format(sample: Path, model: Path) -> None:
    check_format(EXAMPLE, sample, foreign=[model])
    check_format(EXAMPLE, sample / "weights.pqx", foreign=[model])


@pytest.mark.parametrize("options", [{}, {"codec": "example.q6"}, {"codec": "bf16", "alignment": 4096}])
def test_target(model: Path, options: dict[str, object]) -> None:
    check_target(EXAMPLE, model, **options)


def test_alignment(model: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="power of two"):
        polyquant.convert(model, tmp_path / "x", to="example", alignment=48)
    polyquant.convert(model, tmp_path / "y", to="example", alignment=64)
    weights = polyquant.open(tmp_path / "y")
    assert all(array.offset % 64 == 0 for w in weights.values() for array in w.arrays.values())


def test_architecture(tmp_path: Path) -> None:
    check_record(RECORD)
    check_model(RECORD, tmp_path)


def test_a_model_of_this_architecture_runs_from_this_format(sample: Path) -> None:
    logits = polyquant.load(sample).logits([3, 1, 4])
    assert logits.shape == (3, 40) and np.isfinite(logits).all()
