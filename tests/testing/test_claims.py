"""Declared capabilities of codecs, by name; the contract detects false declarations."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

import polyquant
from polyquant import capabilities
from polyquant.capabilities import Packed, Tiled
from polyquant.codecs.opaque import OpaqueCodec
from polyquant.registry import CODECS
from polyquant.testing.capabilities import check_capabilities
from polyquant.testing.codecs import any_parts, check_codec
from polyquant.types import Codec

NAMES = [n for n in capabilities.__all__ if n not in ("Cut", "Field", "Tile", "claims")]
CLAIMS = {
    "f32": "MaybeIntegers Packed Swappable",
    "q4_k": "MayOnlyRead Packed QuantizesStored Swappable",
    "iq2_xxs": "MayOnlyRead Packed QuantizesStored Swappable",
    "tq1_0": "Packed Swappable",
    "i2_s.x86": "Configurable CountsSymbols Packed Stackable",
    "trinity.tq2_0": "Packed",
    "hf_bitnet.bitlinear": "Configurable Packed Stackable",
    "tl2": "Configurable Fitted Stackable Tiled",
    "trellis.3": "Configurable FitsInputs OwnProduct Packed Stackable TrellisDialect WithBits",
    "metal_marlin.4": "Configurable TrellisDialect WithBits",
    "exl3.3.mul1": "TrellisDialect WithBits",
    "gptq.4.g128": "DecodesRows FitsInputs Grouped HoldsAffineCodes MayOnlyRead Ordered OwnProduct Packed "
    "PacksRows QuantizesStored WithBits",
    "awq.4.g128": "DecodesRows FitsInputs Grouped HoldsAffineCodes MayOnlyRead OwnProduct Packed PacksRows "
    "QuantizesStored WithBits",
    "compressed.p4.g128": "DecodesRows FitsInputs Grouped HoldsAffineCodes MayFixInputs MayOnlyRead Ordered OwnProduct "
    "Packed PacksRows QuantizesStored ScalesInputs WithBits",
    "chatglm.4": "DecodesRows FitsInputs HoldsAffineCodes MayOnlyRead OwnProduct Packed PacksRows QuantizesStored "
    "WithBits",
    "fp8.e4m3": "CutsParts DecodesRows MayNeedPeak OwnProduct Packed ScalesInputs",
    "w8a16": "Configurable DecodesRows Grouped HoldsBias OwnProduct Packed WithBits",
}


@pytest.mark.parametrize("name", CLAIMS)
def test_claims_of_each_family(name):
    codec = polyquant.codec(name)
    assert [n for n in NAMES if isinstance(codec, getattr(capabilities, n))] == CLAIMS[name].split()


def test_opaque_bytes_claim_no_other_ability():
    codec = OpaqueCodec(99, 64)
    assert [n for n in NAMES if isinstance(codec, getattr(capabilities, n))] == ["Opaque"]


@pytest.mark.parametrize("name", CODECS)
def test_only_codecs_with_options_are_configured(name):
    codec = polyquant.codec(name)
    if not isinstance(codec, capabilities.Configurable):
        with pytest.raises(TypeError, match="takes no options"):
            polyquant.codec(name, lossy=True)
    assert isinstance(codec, Tiled) == name.startswith("tl")


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A codec with something more, true or not."""

    inner: Codec

    def __str__(self):
        return self.inner.name

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "inner"), name)


class WrongProduct(Wrapped):
    def multiply(self, parts, shape, x, rounding):
        return 2 * x @ self.inner.dequantize(parts, shape).T


class WrongBias(Wrapped):
    def holds_bias(self, tokens, rounding):
        return True


class WrongFields(Wrapped):
    fields = ((0, 2, 1), (1, 2, 1))


class WrongCounts(Wrapped):
    zero_symbol = 1

    def symbol_histogram(self, parts, shape):
        return np.zeros(4, np.uint64)


class WrongBits(Wrapped):
    bits = 0


@pytest.mark.parametrize("wrong", [WrongProduct, WrongBias, WrongFields, WrongCounts, WrongBits])
def test_a_false_claim_is_reported(wrong):
    codec = wrong(polyquant.codec("q8_0"))
    parts = any_parts(polyquant.codec("f32"), (4, 64))
    parts = codec.pack(codec.quantize(np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)))
    check_capabilities(polyquant.codec("q8_0"), parts, (4, 64))
    with pytest.raises(AssertionError):
        check_capabilities(codec, parts, (4, 64))


def test_a_broken_contract_is_reported():
    @dataclass(frozen=True, slots=True)
    class Forgetful(Wrapped):
        def pack(self, codes):
            return {"blocks": self.inner.pack(codes)["blocks"] ^ np.uint8(1)}

    w = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    check_codec(polyquant.codec("q8_0"), w, error=1e-3, weighted=True)
    with pytest.raises(AssertionError):
        check_codec(Forgetful(polyquant.codec("q8_0")), w, error=1e-3, weighted=True)
    with pytest.raises(AssertionError, match="expected at most"):
        check_codec(polyquant.codec("q2_k"), w, error=1e-3, weighted=True)
    with pytest.raises(AssertionError, match="not refused"):
        check_codec(polyquant.codec("w8a16"), w, error=1e-3, weighted=True)  # it takes no importance


def test_packed_is_found_by_name():
    assert isinstance(polyquant.codec("q4_0"), Packed) and not isinstance(replace(polyquant.codec("tl1")), Packed)
