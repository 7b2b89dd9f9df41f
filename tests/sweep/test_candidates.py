"""Short names of candidates, the default ladder, ranges of bits, and the order of measurement."""

from __future__ import annotations

import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS
from polyquant.analysis.sweep.candidates import bits_range, informative_order, ladder, parse_candidate
from polyquant.errors import PlanError, PolyquantError, UnknownNameError

NAMES = {
    "q4_k_m": ({"recipe": "q4_k_m", "to": "gguf"}, "q4_k_m.gguf"),
    "Q4_K_M": ({"recipe": "Q4_K_M", "to": "gguf"}, "Q4_K_M.gguf"),
    "nvfp4": ({"codec": "nvfp4", "to": "gguf"}, "nvfp4.gguf"),
    "w8a16": ({"codec": "w8a16", "to": "msmodelslim"}, "w8a16"),
    "w8a8.dynamic": ({"codec": "w8a8.dynamic", "to": "msmodelslim"}, "w8a8.dynamic"),
    "trellis:3": ({"bits": 3, "to": "trellis-v3"}, "trellis-3"),
    "trellis-v3:3": ({"bits": 3, "to": "trellis-v3"}, "trellis-v3-3"),
    "trellis:2.5": ({"target_bpw": 2.5, "to": "trellis-v3"}, "trellis-2.5"),
    "trellis:3:effort=max": ({"bits": 3, "effort": "max", "to": "trellis-v3"}, "trellis-3-effort=max"),
    "trellis.3.mul1.12": ({"codec": "trellis.3.mul1.12", "to": "trellis-v3"}, "trellis.3.mul1.12"),
    "exl3.3.mul1": ({"codec": "exl3.3.mul1", "to": "hf"}, "exl3.3.mul1"),
    "hf:bf16": ({"recipe": "bf16", "to": "hf"}, "hf-bf16"),
    "bf16": ({"recipe": "bf16", "to": "gguf"}, "bf16.gguf"),
    "w8a16:exact-tool=true": ({"codec": "w8a16", "exact_tool": True, "to": "msmodelslim"}, "w8a16-exact-tool=true"),
    "w8a16:keep=*down*": ({"codec": "w8a16", "keep": ("*down*",), "to": "msmodelslim"}, "w8a16-keep=-down"),
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    found = parse_candidate(name)
    assert (dict(found.options), found.file_name) == NAMES[name]


WRONG = {
    "q4_k_n": (UnknownNameError, "did you mean"),
    "onnx:3": (PlanError, "formats are"),
    "trellis:3:4": (PlanError, "not a candidate"),
    "gguf:3": (PlanError, "take no number of bits"),
    "trellis:3:efort=max": (PlanError, "unknown option 'efort'"),
    "trellis:3:effort=most": (PlanError, "fast, default, max"),
    "w8a16:exact-tool=perhaps": (PlanError, "not a value of this option"),
    "": (UnknownNameError, "recipe or codec"),
    "no-such.toml": (PolyquantError, "no-such.toml"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_names(name):
    kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        parse_candidate(name)


def test_files_are_given_to_the_formats_that_use_them(tmp_path):
    text, matrix = tmp_path / "a.txt", tmp_path / "b.gguf"
    text.write_text("one")
    matrix.write_text("two")
    files = {"calibration": str(text), "importance": str(matrix)}
    assert parse_candidate("w8a8", **files).options == {"codec": "w8a8", "calibration": str(text), "to": "msmodelslim"}
    q4 = parse_candidate("q4_k_m", **files)
    assert q4.options == {"recipe": "q4_k_m", "importance": str(matrix), "to": "gguf"}
    before = q4.key
    matrix.write_text("three")
    assert q4.key != before  # other content, another candidate


def test_target_sizes_share_their_measurements():
    a, b, c = (parse_candidate(f"trellis:{n}") for n in ("2.5", "3.5", "3"))
    assert a.family == b.family and a.key != b.key and a.shares_plan and not c.shares_plan


def test_the_command_of_a_candidate_makes_it(tmp_path):
    source = VECTORS / "models/tiny-llama-untied/hf"
    assert parse_candidate("q4_k_m").command("m/hf") == "polyquant quantize m/hf OUT.gguf --recipe q4_k_m"
    words = parse_candidate("trellis:2.5:effort=fast").command("a b").split(" OUT ")
    assert words == ["polyquant quantize 'a b'", "--target-bpw 2.5 --effort fast --to trellis-v3"]
    candidate = parse_candidate("nvfp4")
    pq.convert(source, tmp_path / candidate.file_name, **candidate.options)
    assert "nvfp4" in pq.inspect(tmp_path / "nvfp4.gguf").codecs


@pytest.mark.parametrize(
    ("text", "step", "names"),
    [
        ("2.5..4", 0.5, ["trellis:2.5", "trellis:3.0", "trellis:3.5", "trellis:4.0"]),
        ("3", 0.5, ["trellis:3.0"]),
        ("2..2.3", 0.1, ["trellis:2.0", "trellis:2.1", "trellis:2.2", "trellis:2.3"]),
    ],
)
def test_ranges(text, step, names):
    assert bits_range(text, step) == names
    assert all("target_bpw" in parse_candidate(n).options for n in names)


@pytest.mark.parametrize(("text", "step"), [("5..2", 0.5), ("a..b", 0.5), ("2..", 0.5), ("2..8", 0.01), ("2..3", 0)])
def test_wrong_ranges(text, step):
    with pytest.raises(PlanError):
        bits_range(text, step)


def test_the_default_ladder_depends_on_the_model():
    floats = pq.inspect(VECTORS / "models/tiny-llama-untied/hf")
    ternary = pq.inspect(VECTORS / "bitnet_gguf/hf_packed_autobitlinear")
    assert "q4_k_m" in ladder(floats) and "i2_s" in ladder(ternary)
    for name in (*ladder(floats), *ladder(ternary)):
        parse_candidate(name)


def test_the_order_covers_the_range_of_sizes():
    sizes = [100, 200, 300, 400, 800, 1600]
    order = informative_order(sizes)
    assert [sizes[i] for i in order[:3]] == [400, 100, 1600]
    assert sorted(order) == list(range(6))
    many = np.random.default_rng(3).uniform(1, 1000, 20).tolist()
    order = informative_order(many)

    def distance(size, done):
        return min(abs(np.log(size / many[j])) for j in done)

    for n in range(3, 20):  # always the one farthest from those done
        assert distance(many[order[n]], order[:n]) == max(distance(many[i], order[:n]) for i in order[n:])
    assert informative_order([5.0]) == [0] and informative_order([]) == []
