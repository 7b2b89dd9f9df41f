"""Native kernels and numpy references write the same bytes for any finite floats."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import polyquant
from polyquant.ops import native
from polyquant.types import Floats

NAMES = [
    "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1", "q1_0", "q2_0", "mxfp4", "nvfp4", "tq1_0", "tq2_0",
]  # fmt: skip
ANY = st.floats(width=32)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def packed(name: str, w: np.ndarray, engine: str) -> np.ndarray:
    codec = polyquant.codec(name)
    with native.engine(engine):
        return codec.pack(codec.quantize(w))["blocks"]


@pytest.mark.parametrize("name", NAMES)
@given(arrays(np.float32, (1, 256), elements=FINITE))
@settings(deadline=None, max_examples=40)
def test_engines_give_equal_bytes(name, w):
    np.testing.assert_array_equal(packed(name, w, "native"), packed(name, w, "numpy"))


@pytest.mark.parametrize("name", NAMES)
@given(arrays(np.float32, (1, 256), elements=ANY))
@settings(deadline=None, max_examples=20)
def test_any_float_round_trips_or_is_refused(name, w):
    for engine in ("native", "numpy"):
        codec = polyquant.codec(name)
        with native.engine(engine):
            if codec.form is not Floats and not np.isfinite(w).all():
                with pytest.raises(polyquant.CodecError, match="NaN or infinity"):
                    codec.quantize(w)
            else:
                assert codec.dequantize(codec.pack(codec.quantize(w)), w.shape).shape == w.shape
