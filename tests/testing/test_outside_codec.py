"""A codec of another package, found by its entry point, works like a built-in one, with a separate search."""

import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import numpy as np
import pytest

import polyquant
from polyquant import registry
from polyquant.errors import UnknownNameError
from polyquant.rows import in_memory
from polyquant.runtime.linear import Linear
from polyquant.testing.codecs import check_codec, check_registered
from polyquant.types import Weight


@pytest.fixture
def outside(monkeypatch):
    """The module, importable as `outside_codec`, with the entry points of an installed package."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.delitem(sys.modules, "outside_codec", raising=False)
    points = [
        metadata.EntryPoint(name, f"outside_codec:{attribute}", "polyquant.codecs")
        for name, attribute in (("outside.rounded", "ROUNDED"), ("outside.searched", "SEARCHED"), ("family.*", "named"))
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points if group == "polyquant.codecs" else [])
    registry._load.cache_clear()
    registry._attribute.cache_clear()
    yield import_module("outside_codec")
    registry._load.cache_clear()
    registry._attribute.cache_clear()


@pytest.fixture
def weight():
    return np.random.default_rng(1).standard_normal((16, 64)).astype(np.float32)


@pytest.mark.parametrize("name", ["outside.rounded", "outside.searched"])
def test_fulfils_the_contract(outside, name, weight, engine):
    codec = polyquant.codec(name)
    check_codec(codec, weight, error=1e-4, weighted=True)
    check_registered(codec)


def error(codec, w):
    return float(np.square(codec.dequantize(codec.pack(codec.quantize(w)), w.shape) - w).sum())


def test_its_search_finds_better_codes_than_its_rounding(outside, weight):
    assert error(polyquant.codec("outside.searched"), weight) < error(polyquant.codec("outside.rounded"), weight)


def test_a_search_is_imported_when_it_is_called(outside):
    search = polyquant.codec("outside.searched").encode
    assert search.place == "outside_codec:nearest_step"
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        registry.Search("no_such_module:function")(np.zeros((1, 16), np.float32), None)


def test_a_built_in_layout_with_a_different_search(outside, weight):
    codec = outside.TRELLIS
    assert codec.name == "trellis.3"
    assert not codec.dequantize(codec.pack(codec.quantize(weight)), weight.shape).any()
    again = polyquant.codec("trellis.3", search=outside.zeros)
    assert not again.dequantize(again.pack(again.quantize(weight)), weight.shape).any()


def test_the_runtime_supports_it(outside, weight):
    codec = polyquant.codec("outside.searched")
    parts = codec.pack(codec.quantize(weight))
    held = Weight("w", weight.shape, codec, in_memory(parts))
    linear = Linear([held], [None], "none")
    x = np.random.default_rng(2).standard_normal((3, 64)).astype(np.float32)
    np.testing.assert_allclose(linear(x)[0], x @ codec.dequantize(parts, weight.shape).T, rtol=1e-5, atol=1e-5)
    assert linear.kernel == "dequantized"


def test_a_family_with_options_in_its_names(outside, weight):
    codec = polyquant.codec("family.3")
    assert codec.name == "family.3"
    check_codec(codec, weight, error=0.05, weighted=True)
    check_registered(codec)
    with pytest.raises(UnknownNameError, match=r"family\.3"):
        polyquant.codec("family.x")


def test_without_the_package_the_name_is_unknown():
    with pytest.raises(UnknownNameError):
        polyquant.codec("outside.rounded")


def test_layouts_import_no_search():
    said = (
        "import sys, polyquant.registry as r; [r.codec(n) for n in r.CODECS]; "
        "print([m for m in sys.modules if 'quantizers' in m])"
    )
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_contract_needs_no_pytest():
    said = (
        "import sys, polyquant.testing.codecs; "
        "print([m for m in sys.modules if m.partition('.')[0] in ('pytest', 'hypothesis')])"
    )
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
