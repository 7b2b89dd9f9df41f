"""The house rules on random state, format names and import cycles are detected, without false positives."""

import ast
import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/check_house.py"

SHARED = {
    "of a module": "RNG = np.random.default_rng(5)",
    "of a module, in a list": "if True:\n    BOTH = [random.Random(1)]",
    "of a class": "class T:\n    rng = np.random.RandomState(5)",
    "default value": "def layer(n, rng=np.random.default_rng(5)): ...",
    "of a parametrized test": "@pytest.mark.parametrize('rng', [np.random.default_rng(5)])\ndef test(rng): ...",
    "of a wide fixture": "@pytest.fixture(scope='module')\ndef rng():\n    return np.random.default_rng(5)",
    "of a function that caches": "@lru_cache(maxsize=1)\ndef rng():\n    return random.Random(5)",
    "of a cached function": "@cache\ndef rng():\n    return random.Random(5)",
    "of Python": "def test():\n    return random.shuffle([1, 2])",
    "of numpy": "def test():\n    return np.random.standard_normal(3)",
    "without a seed": "def test():\n    return np.random.default_rng()",
}

SOUND = """
def layer(seed, rng: np.random.Generator | None = None):
    return (rng or np.random.default_rng(seed)).standard_normal(3)

@pytest.fixture
def rng():
    return random.Random(5)

@pytest.fixture(scope="module")
def weight():
    rng = np.random.default_rng(0)
    return rng.standard_normal(3)

@given(st.integers())
def test(seed, rng):
    rng.shuffle([1, 2])
    random.Random(seed).shuffle([1, 2])
"""


def script():
    spec = importlib.util.spec_from_file_location("check_house", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found(text):
    return list(script().shared_randomness(ast.parse(text)))


@pytest.mark.parametrize("name", SHARED)
def test_shared_randomness_is_found(name):
    assert len(found(SHARED[name])) == 1


def test_generators_inside_tests_are_accepted():
    assert found(SOUND) == []


@pytest.mark.parametrize(
    "line",
    ["if checkpoint.format == 'gguf': pass", "x = to in ('gguf', 'hf')", "if 'hf' != plan.format: pass",
    "isinstance(w.codec, Trellis)", "isinstance(c, (Packed, MsModelSlim))"],
)  # fmt: skip
def test_branches_on_a_format_or_a_codec_are_found(line):
    module = script()
    tree = ast.parse(line)
    assert list(module.names_a_format(Path("conversion/plan.py"), tree))
    assert not list(module.names_a_format(Path("formats/trellis/target.py"), tree))
    assert list(module.names_a_format(Path("formats/plain_target.py"), tree))


@pytest.mark.parametrize("line", ["found.format == other.format", "isinstance(codec, Packed)", "version == 'gguf'"])
def test_other_comparisons_are_accepted(line):
    assert not list(script().names_a_format(Path("conversion/plan.py"), ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    ["from p.a import x", "import p.a", "from p import a", "if TYPE_CHECKING:\n    from p.a import X",
    "def f():\n    from p.a import x"],
)  # fmt: skip
def test_import_cycles_are_found(line):
    sources = {
        "p.a": "from p.b import y",
        "p.b": "from p.c import z",
        "p.c": line,
        "p.d": "from p.a import x\nimport numpy",
    }
    assert list(script().import_circles(sources)) == ["import cycle: p.a -> p.b -> p.c -> p.a"]


def test_each_cycle_is_reported_once():
    sources = {"p.a": "import p.b", "p.b": "import p.a", "p.x": "from p import y, a", "p.y": "from p.x import z"}
    assert list(script().import_circles(sources)) == ["import cycle: p.a -> p.b -> p.a",
    "import cycle: p.x -> p.y -> p.x"]  # fmt: skip


def test_imports_without_a_cycle_are_accepted():
    sources = {
        "p": "from p.a import x",
        "p.a": "from p.b import y\nfrom p import b",
        "p.b": "import p.c.d",
        "p.c": "",
        "p.c.d": "from os import path",
    }
    assert not list(script().import_circles(sources))


def test_the_package_has_no_cycle():
    found = script().package_sources()
    assert len(found) > 200 and "polyquant.registry" in found
    assert not list(script().import_circles(found))
