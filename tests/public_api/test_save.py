"""polyquant.save: arrays and weights to every target, by the plan and the writer of conversions."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from gguf import GGUFReader

import polyquant as pq


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "layers.0.proj.weight": rng.standard_normal((128, 256)).astype(np.float32),
        "layers.1.proj.weight": rng.standard_normal((128, 256)).astype(ml_dtypes.bfloat16),
        "norm.weight": np.linspace(0, 1, 256, dtype=np.float16),
    }


DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.int16, np.int32, np.int64]
MORE = [np.uint8, np.uint16, np.uint32, np.uint64, np.bool_, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


@pytest.mark.parametrize("name", ["a.gguf", "a.safetensors", "folder"])
def test_dtypes_and_shapes_come_back(name, tmp_path):
    dtypes = DTYPES if name == "a.gguf" else DTYPES + MORE
    base = np.arange(24).reshape(2, 3, 4) % 2
    given = {
        f"{np.dtype(d).name} {k}": v.astype(d)
        for d in dtypes
        for k, v in {"3d": base, "2d": base[0], "1d": base[0, 0], "0d": base[0, 0, 1]}.items()
    }
    given |= {"transposed": base[0].T.astype(np.float32), "other order": base[0].astype(">f4"), "list": [[1.0, 2.0]]}
    report = pq.save(given, tmp_path / name)
    opened = pq.open(tmp_path / name)
    assert opened.keys() == given.keys() and not report.error.count
    for key, value in given.items():
        array = np.asarray(value)
        np.testing.assert_array_equal(
            np.asarray(opened[key], np.float64).reshape(array.shape), array.astype(np.float64)
        )
        if "d" in key[-2:]:
            kept = opened[key].codec.dtype
            assert kept == array.dtype, key


def test_other_readers_read_it(tmp_path):
    given = {k: v for k, v in arrays().items() if v.dtype != ml_dtypes.bfloat16}
    pq.save(given, tmp_path / "a.safetensors", metadata={"who": "me"})
    read = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    assert {k: v.tobytes() for k, v in read.items()} == {k: v.tobytes() for k, v in given.items()}
    pq.save(
        given, tmp_path / "a.gguf", codec={"*proj*": "q8_0"}, metadata={"general.name": "x", "n": 3, "list": ["a", "b"]}
    )
    reader = GGUFReader(tmp_path / "a.gguf")
    assert [(t.name, t.tensor_type.name) for t in reader.tensors] == [
        ("layers.0.proj.weight", "Q8_0"),
        ("norm.weight", "F16"),
    ]
    assert reader.fields["n"].contents() == 3 and reader.fields["list"].contents() == ["a", "b"]


def test_codecs_by_glob_first_match_wins(tmp_path):
    report = pq.save(arrays(), tmp_path / "a.gguf", codec={"*.0.*": "q4_k", "*": "q8_0"}, rules=["norm.weight=f32"])
    assert [s.target for s in report.steps] == ["q4_k", "q8_0", "f32"]
    assert report.steps[0].error is not None and report.steps[0].error.snr > 20
    assert not pq.compare(tmp_path / "a.gguf", tmp_path / "a.gguf").error.dd


def test_one_codec_is_for_matrices(tmp_path):
    report = pq.save(arrays(), tmp_path / "a.gguf", codec="q6_k")
    assert [s.target for s in report.steps] == ["q6_k", "q6_k", "f16"]
    report = pq.save(arrays(), tmp_path / "b.gguf", recipe="q4_k_m")
    assert [s.target for s in report.steps] == ["q4_k", "q4_k", "f16"]


def test_weights_keep_their_codes(tmp_path):
    pq.save(arrays(), tmp_path / "a.gguf", codec="q4_k")
    opened = pq.open(tmp_path / "a.gguf")
    weight = opened["layers.0.proj.weight"]
    report = pq.save({"renamed": weight, "float": np.ones((2, 2), np.float32)}, tmp_path / "b.gguf")
    assert [s.action for s in report.steps] == ["copy", "copy"]
    np.testing.assert_array_equal(pq.open(tmp_path / "b.gguf")["renamed"].parts["blocks"], weight.parts["blocks"])
    with pytest.raises(pq.PlanError, match="requantize"):
        pq.save({"a": weight}, tmp_path / "c.gguf", codec="q3_k")
    report = pq.save({"a": weight}, tmp_path / "c.gguf", codec="q3_k", requantize=True)
    assert report.steps[0].action == "requantize"
    report = pq.save({"a": weight}, tmp_path / "d.safetensors", codec="bf16")
    assert report.steps[0].action == "dequantize"


def test_a_checkpoint_is_a_mapping_of_weights(tmp_path):
    pq.save(arrays(), tmp_path / "a.gguf", codec="q4_k", metadata={"general.name": "kept", "x.flags": [True, False]})
    opened = pq.open(tmp_path / "a.gguf")
    pq.save(opened, tmp_path / "b.gguf", metadata=opened.metadata)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


@pytest.mark.parametrize(
    ("options", "codec", "findings"),
    [
        ({"to": "trellis-v3", "bits": 3}, "trellis", {"MOD003", "TRL004"}),
        ({"codec": "trellis.4"}, "trellis", {"MOD003", "TRL004"}),
        ({"to": "msmodelslim", "codec": "w8a16"}, "w8a16", {"ASC017", "MOD003"}),
    ],
)
def test_folders_of_linear_layers(options, codec, findings, tmp_path):
    report = pq.save(
        arrays(),
        tmp_path / "out",
        metadata={"model_type": "mine", "architectures": ["Mine"], "torch_dtype": "bfloat16"},
        **options,
    )
    assert [s.target.partition(".")[0] for s in report.steps[:2]] == [codec, codec]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "mine"
    assert {f.code for f in pq.validate(tmp_path / "out")} == findings


def test_metadata_types(tmp_path):
    values = {
        "u": 3,
        "i": -3,
        "wide": 1 << 40,
        "f": 1.5,
        "b": True,
        "s": "text",
        "u16": pq.Meta(pq.Kind.UINT16, 7),
        "np": np.int8(-2),
        "ints": [1, -2],
        "floats": [1, 2.5],
        "words": ["a"],
        "array": np.array([1, 2], np.uint64),
        "flags": (True, False),
    }
    pq.save(arrays(), tmp_path / "a.gguf", metadata=values)
    typed = dict(pq.open(tmp_path / "a.gguf").metadata.items_typed())
    kinds = {key: (typed[key].item or typed[key].kind).name for key in values}
    assert kinds == {
        "u": "UINT32",
        "i": "INT32",
        "wide": "INT64",
        "f": "FLOAT32",
        "b": "BOOL",
        "s": "STRING",
        "u16": "UINT16",
        "np": "INT8",
        "ints": "INT32",
        "floats": "FLOAT32",
        "words": "STRING",
        "array": "UINT64",
        "flags": "BOOL",
    }


@pytest.mark.parametrize(
    ("tensors", "options", "says"),
    [
        ({}, {}, "no tensors to save"),
        ({"a": "text"}, {}, "a: is not an array of numbers"),
        ({"a": np.zeros(2, np.complex64)}, {}, "a: is not an array of numbers"),
        ({"a": np.zeros(2, np.longdouble)}, {}, "a: has a dtype that no format stores"),
        ({"a": [[1], [1, 2]]}, {}, "a: numpy cannot make an array of it"),
        ({3: np.zeros(2)}, {}, "a tensor needs a name"),
        ({"a": np.zeros((2, 2), np.uint8)}, {"to": "gguf"}, "GGUF has no type for u8"),
        ({"a": np.zeros(32)}, {"to": "gguf", "codec": "q8_0"}, "no tensor would be quantized"),
        ({"a": np.zeros((2, 2))}, {"to": "gguf", "codec": {"*": "w8a16"}}, "w8a16"),
        ({"a": np.zeros((2, 2))}, {"codec": "q4_k", "recipe": "q4_k_m"}, "mutually exclusive"),
        ({"a": np.zeros((2, 2))}, {"to": "trellis-v3", "bits": 3}, "no weight would be quantized"),
        ({"a": np.zeros((2, 2))}, {"to": "trellis-v3", "bits": 3, "calibration": "self"}, "needs a model"),
        ({"a": np.zeros((2, 2))}, {"to": "gguf", "bits": 3}, "add --to trellis-v3"),
        ({"a": np.zeros((2, 2))}, {"to": "gguf", "metadata": {"k": object()}}, "cannot be inferred"),
        ({"a": np.zeros((2, 2))}, {"to": "gguf", "metadata": {"k": [1, "a"]}}, "cannot be inferred"),
        ({"a": np.zeros((2, 2))}, {"to": "gguf", "metadata": {"general.alignment": 64}}, "cannot be chosen"),
        ({"a": np.zeros((2, 2))}, {"metadata": {"k": object()}}, "does not fit config.json"),
        ({"a": np.zeros((2, 2))}, {"metadata": {"k": float("nan")}}, "does not fit config.json"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(tensors, options, says, tmp_path):
    with pytest.raises(pq.PolyquantError) as caught:
        pq.save(tensors, tmp_path / "out", **options)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_metadata_of_a_single_file_is_text(tmp_path):
    with pytest.raises(pq.PlanError, match=r"metadata of a .safetensors file is text: 'n' is int"):
        pq.save(arrays(), tmp_path / "a.safetensors", metadata={"n": 3})


def test_unknown_options_are_type_errors(tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'bit'"):
        pq.save(arrays(), tmp_path / "a.gguf", bit=3)


def test_existing_files_need_overwrite(tmp_path):
    path = tmp_path / "a.gguf"
    pq.save(arrays(0), path)
    before = path.read_bytes()
    with pytest.raises(pq.PlanError, match="target exists"):
        pq.save(arrays(1), path)
    assert path.read_bytes() == before
    weights = pq.open(path)
    pq.save({"again": weights["layers.0.proj.weight"]}, path, overwrite=True)  # the file that is read, replaced
    np.testing.assert_array_equal(np.asarray(pq.open(path)["again"]), arrays(0)["layers.0.proj.weight"])
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


def test_nan_is_refused_by_quantizers_and_kept_by_floats(tmp_path):
    given = arrays()
    given["layers.0.proj.weight"][3, 7] = np.nan
    for measure in (True, False):
        with pytest.raises(
            pq.InputError, match=r"q4_k cannot quantize NaN or infinity .found 1 of 32,768 values, first nan at .3, 7."
        ):
            pq.save(given, tmp_path / "a.gguf", codec="q4_k", measure=measure)
    assert not list(tmp_path.iterdir())
    pq.save(given, tmp_path / "b.gguf")
    assert np.isnan(np.asarray(pq.open(tmp_path / "b.gguf")["layers.0.proj.weight"])).sum() == 1


def test_equal_arrays_give_equal_bytes(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        pq.save(arrays(), tmp_path / name, codec="q4_k")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_names_that_look_like_globs(tmp_path):
    given = {"w[0]": np.ones(3, np.float64), "w*": np.ones((2, 32), np.float32)}
    report = pq.save(given, tmp_path / "a.gguf", codec={"w*": "q8_0"})
    assert [s.target for s in report.steps] == ["f64", "q8_0"]
