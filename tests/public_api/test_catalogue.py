"""polyquant.codecs(), recipes() and formats(), and the commands of the same names."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import polyquant as pq
from polyquant.registry import FORMATS, known_codecs
from polyquant.types import Floats


def test_every_codec_is_listed():
    listed = {info.name: info for info in pq.codecs()}
    assert listed.keys() == set(known_codecs())
    assert all(info.about and info.read_by for info in listed.values())
    assert listed["q4_k"] == pq.CodecInfo(
        "q4_k",
        "blocks",
        4.5,
        256,
        True,
        "ggml K-quants: super-blocks of 256 weights with quantized scales",
        ("gguf",),
        ("gguf",),
    )
    assert listed["gptq.4.g128"].quantizes and listed["gptq.4.g128"].written_by == ("hf",)
    assert not listed["chatglm.4"].quantizes and listed["chatglm.4"].written_by == ()
    assert listed["f32"].written_by == tuple(FORMATS)
    assert listed["iq2_xxs"].held_by == "gguf (copy only)" and listed["chatglm.4"].held_by == "hf (read only)"


@pytest.mark.parametrize("info", [i for i in pq.codecs() if i.quantizes and i.block > 1], ids=lambda i: i.name)
def test_quantizes_agrees_with_quantize(info):
    codec = pq.codec(info.name)
    if codec.form is not Floats:
        with pytest.raises(pq.CodecError):
            codec.quantize(np.full((codec.granule[0], codec.granule[1]), np.inf, np.float32))


@pytest.mark.parametrize(
    "info",
    [i for i in pq.codecs() if "gguf" in i.written_by and i.quantizes and not i.name.startswith("tl")],
    ids=lambda i: i.name,
)
def test_codecs_listed_for_gguf_can_be_written(info, tmp_path):
    rng = np.random.default_rng(0)
    ternary = info.form == "ternary" or info.name.startswith("i")
    values = rng.integers(-1, 2, (256, 256)) if ternary else rng.standard_normal((256, 256))
    values = values.astype(
        np.dtype(pq.codec(info.name).dtype) if info.name in ("i8", "i16", "i32", "i64") else np.float32
    )
    pq.save({"blk.0.w.weight": values}, tmp_path / "a.gguf", codec={"*": info.name})
    layout = {"ternary_layout": info.name} if "i2_s" in info.name else {}
    layout |= {"dialect": "trinity"} if info.name.startswith("trinity") else {}
    assert pq.open(tmp_path / "a.gguf", **layout)["blk.0.w.weight"].codec.name == info.name


def test_recipes_have_published_sizes():
    """Bits per weight of Llama 3.1 8B as llama.cpp's quantize tool documents them."""
    published = {
        "q4_k_m": 4.89,
        "q5_k_m": 5.70,
        "q3_k_m": 4.00,
        "q6_k": 6.56,
        "q8_0": 8.50,
        "q4_k_s": 4.67,
        "q2_k": 3.16,
    }
    found = {name: pq.recipes()[name].bpw for name in published}
    assert found == pytest.approx(published, abs=0.006)
    assert pq.recipes()["q4_k_m"].codecs == ("q4_k", "q6_k")


def test_formats_list_their_options():
    listed = pq.formats()
    assert [info.name for info in listed] == list(FORMATS)
    assert "bits" in listed["trellis-v3"].options and "ternary_layout" in listed["gguf"].open_options
    assert listed["gguf"].files == "one .gguf file, or the members of a split model"


def test_an_unknown_name_suggests_similar_ones():
    with pytest.raises(pq.UnknownNameError, match="did you mean q4_k_m"):
        pq.recipes()["q4km"]
    assert pq.codecs()[0].name == "f32" and len(pq.codecs()[:2]) == 2


@pytest.mark.parametrize("name", ["codecs", "recipes", "formats"])
def test_commands_print_the_same_lists(name):
    def printed(*words):
        return subprocess.run(
            [sys.executable, "-m", "polyquant", name, *words], capture_output=True, text=True, check=True
        ).stdout

    listed = getattr(pq, name)()
    lines = printed().splitlines()
    assert [line.split()[0] for line in lines[1 : len(listed) + 1]] == [info.name for info in listed]
    assert max(map(len, lines)) <= 80
    assert [entry["name"] for entry in json.loads(printed("--format", "json"))] == [info.name for info in listed]
