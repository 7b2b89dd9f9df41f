"""Codecs of small floats: the contract, errors against the libraries' rules, and codes kept between codecs."""

import numpy as np
import pytest

import polyquant
from polyquant.testing.codecs import check_codec, check_registered

ERRORS = {
    "hf_mxfp4": 0.02, "hf_mxfp8": 0.002, "hf_nvfp4": 0.012, "hf_nvfp4.div": 0.012, "hf_nvfp4.plain": 0.02,
    "fp8.e4m3": 0.002, "fp8.e4m3.tensor.f32": 0.002, "fp8.e5m2.b128": 0.01, "fp8.e4m3.b128.inv.e8m0": 0.002,
}  # fmt: skip


def gaussians(rows, k, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)


@pytest.mark.parametrize("name", ERRORS)
def test_contract(name, engine):
    codec = polyquant.codec(name)
    check_codec(codec, gaussians(16, 256), error=ERRORS[name], weighted=True)
    check_registered(codec)
