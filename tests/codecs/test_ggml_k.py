import numpy as np
import pytest

import polyquant
from contract import check_dequantize, same_floats
from golden import arrays, cases
from polyquant.ops import native

NAMES = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_k"]


@pytest.mark.parametrize("name", NAMES)
def test_dequantize_equals_ggml(name, engine):
    for _, packed, expected in cases(arrays(f"ggml/{name}.npz")):
        check_dequantize(name, packed, expected)


@pytest.mark.parametrize("name", NAMES)
def test_any_bytes_decode_alike_in_both_engines(name):
    if native.lib() is None:
        pytest.skip("native kernels are not built or switched off")
    codec = polyquant.codec(name)
    packed = np.random.default_rng(3).integers(0, 256, (64, 2 * codec.type_size), np.uint8)
    found = {}
    for which in ("native", "numpy"):
        with native.engine(which):
            found[which] = codec.dequantize({"blocks": packed}, (64, 512))
    same_floats(found["native"], found["numpy"])
