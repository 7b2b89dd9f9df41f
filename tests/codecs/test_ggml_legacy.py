import pytest

from contract import check_dequantize, check_quantize_bytes, check_sizes
from golden import arrays, cases

NAMES = ["q8_0"]


@pytest.mark.parametrize("name", NAMES)
def test_dequantize_equals_ggml(name, engine):
    for _, packed, expected in cases(arrays(f"ggml/{name}.npz")):
        check_dequantize(name, packed, expected)


@pytest.mark.parametrize("name", NAMES)
def test_quantize_gives_ggml_bytes(name, engine):
    z = arrays(f"ggml/{name}.npz")
    check_quantize_bytes(name, z["source"], z["packed"])
    check_quantize_bytes(name, z["source_edge"], z["packed_edge"])


@pytest.mark.parametrize("name", NAMES)
def test_sizes(name, engine):
    check_sizes(name)
