"""The built-in formats pass the format contract."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from polyquant import registry
from polyquant.conversion.convert import convert
from polyquant.options import NoOptions
from polyquant.testing.formats import check_format, check_target
from polyquant.types import Evidence

VECTORS = Path(__file__).resolve().parents[1] / "vectors"
LLAMA = VECTORS / "models" / "tiny-llama-untied" / "hf"
SAMPLES = {
    "gguf": VECTORS / "gguf" / "meta_all_types_v3_le.gguf",
    "hf": VECTORS / "hf_bin",
    "trellis-v3": VECTORS / "trellis" / "v3_shard_writer",
    "msmodelslim": VECTORS / "msmodelslim" / "v1" / "bf16" / "w8a16",
}
FOREIGN = {
    "gguf": ["hf", "trellis-v3", "msmodelslim"],
    "hf": ["gguf"],
    "trellis-v3": ["gguf", "hf", "msmodelslim"],
    "msmodelslim": ["gguf", "hf", "trellis-v3"],
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model of one layer in a Hugging Face folder."""
    from polyquant.architectures.llama import LLAMA as RECORD
    from polyquant.testing.architectures import tiny_model

    return tiny_model(RECORD, tmp_path_factory.mktemp("model") / "hf")


def test_foreign_options_are_reported(tmp_path):
    class Wrong(type(registry.format_named("hf"))):
        target_options = NoOptions

    with pytest.raises(AssertionError, match="target_options"):
        check_format(Wrong(), SAMPLES["hf"])


@pytest.mark.parametrize("name", registry.FORMATS)
def test_formats_fulfil_the_contract(name):
    check_format(registry.format_named(name), SAMPLES[name], [SAMPLES[other] for other in FOREIGN[name]])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gguf", {}),
        ("gguf", {"codec": "q8_0"}),
        ("hf", {}),
        ("hf", {"codec": "bf16"}),
        ("trellis-v3", {"bits": 3, "effort": "fast"}),
        ("msmodelslim", {"codec": "w8a16"}),
    ],
)
def test_targets_fulfil_the_contract(name, options, tiny):
    check_target(registry.format_named(name), tiny, **options)


def test_every_format_has_a_sample():
    assert set(SAMPLES) == set(FOREIGN) == set(registry.FORMATS)


@dataclass
class Wrong:
    """A built-in format with one thing changed."""

    form: object
    changed: dict

    def __getattr__(self, name):
        return self.changed[name] if name in self.changed else getattr(self.form, name)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"name": "G GUF"}, "not a valid name for --to"),
        ({"findings": {"GGUF001": ""}}, "explain its meaning"),
        ({"findings": {"HF001": "A code that is used for another finding already."}}, "already used by hf"),
        ({"open_options": Wrong}, "not frozen"),
        ({"sniff": lambda path: Evidence("gguf", "anything")}, "claims "),
        ({"sniff": lambda path: None}, "is not recognised"),
        ({"own_files": lambda folder, names: {"README.md"}}, "not part of a model"),
        ({"check": lambda path: []}, "`check` reports nothing"),
    ],
)
def test_the_contract_finds_violations(changed, says):
    with pytest.raises(AssertionError, match=says):
        check_format(Wrong(registry.format_named("gguf"), changed), SAMPLES["gguf"])


def test_a_target_that_rounds_silently_is_reported(tiny, monkeypatch):
    from polyquant.testing import formats

    monkeypatch.setattr(formats, "convert", lambda *args, **kwargs: convert(*args, **{**kwargs, "measure": False}))
    with pytest.raises(AssertionError, match="the report has 0"):
        check_target(registry.format_named("gguf"), tiny, codec="q8_0")


def test_formats_are_tried_by_descending_priority_and_imported_lazily(tmp_path):
    order = [f.priority for f in registry.formats()]
    assert order == sorted(order, reverse=True) and len(set(order)) == len(order)
    code = "import polyquant as pq, sys; pq.open(sys.argv[1]); print('polyquant.formats.huggingface' in sys.modules)"
    path = VECTORS / "models/tiny-llama-untied/tiny-llama-untied-Q4_0.gguf"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
