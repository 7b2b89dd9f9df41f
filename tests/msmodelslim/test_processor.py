"""MSModelSlimWeightProcessor: the operations of the document on state dicts, compared with the tool's own output."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from golden import VECTORS
from polyquant.codecs.dtypes import NUMPY, WORDS
from polyquant.errors import InputError, PlanError
from polyquant.formats.huggingface.open import open as open_hf
from polyquant.msmodelslim import MSModelSlimWeightProcessor
from polyquant.opening import open_checkpoint

MSMODELSLIM = VECTORS / "msmodelslim"


def genuine(mode):
    (file,) = (MSMODELSLIM / mode).glob("quant_model_weight*.safetensors")
    (description,) = (MSMODELSLIM / mode).glob("quant_model_description*.json")
    return load_file(file), json.loads(description.read_text())


def same(found, wanted):
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def stored(path):
    """Return the stored tensors of a file, also with dtypes that numpy lacks."""
    return {
        name: np.frombuffer(w.parts["blocks"].tobytes(), NUMPY[WORDS[w.codec.name.removeprefix("undecoded.")]]).reshape(
            w.shape
        )
        for name, w in open_hf(path).items()
    }


def chatglm(bits):
    return load_file(MSMODELSLIM / f"chatglm2/int{bits}/model.safetensors")


def pickled(bits):
    return stored(MSMODELSLIM / f"chatglm2/int{bits}/pytorch_model.bin")


# ---------------------------------------------------------------- W8A16


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("read", [chatglm, pickled])
@pytest.mark.parametrize("num_layers", [None, 2])
def test_chatglm_equals_the_tools_example(tmp_path, bits, read, num_layers):
    processor = MSModelSlimWeightProcessor(read(bits), num_layers=num_layers)
    processor.weight_process()
    weights, description = genuine(f"chatglm2/msmodelslim_from_int{bits}")
    same(processor.modelslim_weight_dict, weights)
    assert processor.modelslim_description_json == description
    processor.save(tmp_path / "out")
    same(load_file(tmp_path / "out/quant_model_weight_w8a16.safetensors"), weights)
    assert json.loads((tmp_path / "out/quant_model_description_w8a16.json").read_text()) == description
    opened = open_checkpoint(tmp_path / "out")
    assert opened.format == "msmodelslim"
    assert sum(w.codec.name == "w8a16.f16" for w in opened.values()) == 8
    with pytest.raises(PlanError, match="target exists"):
        processor.save(tmp_path / "out")


def test_torch_tensors_are_accepted():
    torch = pytest.importorskip("torch")
    tensors = {n: torch.from_numpy(a.copy()) for n, a in chatglm(4).items()}
    tensors["extra.weight"] = torch.tensor([1.5, -2.0]).to(torch.bfloat16)
    processor = MSModelSlimWeightProcessor(tensors)
    processor.weight_process()
    extra = processor.modelslim_weight_dict.pop("extra.weight")
    assert extra.dtype == ml_dtypes.bfloat16
    assert extra.astype(np.float32).tolist() == [1.5, -2.0]
    same(processor.modelslim_weight_dict, genuine("chatglm2/msmodelslim_from_int4")[0])


def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    page = (Path(__file__).resolve().parents[2] / "docs/formats/msmodelslim.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(from polyquant.msmodelslim.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    exec(example, {"state_dict": chatglm(8)})
    same(
        load_file(tmp_path / "model-w8a16/quant_model_weight_w8a16.safetensors"),
        genuine("chatglm2/msmodelslim_from_int8")[0],
    )


def test_the_given_dict_is_not_changed():
    source = chatglm(4)
    before = {n: a.copy() for n, a in source.items()}
    MSModelSlimWeightProcessor(source).weight_process()
    same(source, before)


def test_unsigned_codes_are_shifted_with_their_offsets():
    """The document's note: subtract 128 from weight and offset."""
    rng = np.random.default_rng(0)
    signed, z, s = rng.integers(-128, 128, (4, 6)), rng.integers(-20, 20, (4, 2)), rng.random((4, 2), np.float32)
    given = {
        "a.weight": (signed + 128).astype(np.uint8),
        "a.weight_scale": s,
        "a.weight_offset": (z + 128).astype(np.float32),
    }
    processor = MSModelSlimWeightProcessor(given)
    processor.weight_process()
    out = processor.modelslim_weight_dict
    same(out, {"a.weight": signed.astype(np.int8), "a.weight_scale": s, "a.weight_offset": z.astype(np.float32)})
    del given["a.weight_offset"]  # codes that are unsigned without one: w = q s
    processor = MSModelSlimWeightProcessor(given)
    processor.weight_process()
    assert (processor.modelslim_weight_dict["a.weight_offset"] == -128).all()


# ---------------------------------------------------------------- W8A8


PARTS = ("weight", "input_scale", "input_offset", "quant_bias", "deq_scale")


@pytest.mark.parametrize("mode", ["v0/fp16/w8a8s", "v0/fp16/w8a8", "v0/bf16/w8a8", "v0/fp16/w8a8_per_tensor"])
@pytest.mark.parametrize("computed", [False, True])
def test_static_layers_equal_the_tools(mode, computed):
    if "bf16" in mode:
        weights = stored(next((MSMODELSLIM / mode).glob("quant_model_weight*.safetensors")))
        description = genuine_description(mode)
    else:
        weights, description = genuine(mode)
    given = dict(weights)
    for name, array in weights.items():
        if name.endswith("deq_scale") and array.dtype == np.int64:
            given[name] = array.astype(np.uint32).view(np.float32)  # as another tool stores it
        if computed and name.endswith("quant_bias"):
            del given[name]
    processor = MSModelSlimWeightProcessor(given, quant_type=description["model_quant_type"])
    processor.weight_activation_process()
    same(processor.modelslim_weight_dict, weights)
    said = processor.modelslim_description_json
    assert {n: said[n] for n in weights if n.endswith(PARTS)} == {
        n: description[n] for n in weights if n.endswith(PARTS)
    }
    assert {n for n, kind in said.items() if kind == "FLOAT"} == {
        n for n, kind in description.items() if kind == "FLOAT"
    }


def test_a_missing_deq_scale_is_computed():
    weights, _ = genuine("v0/fp16/w8a8")
    given = {n: a for n, a in weights.items() if not n.endswith("deq_scale")}
    processor = MSModelSlimWeightProcessor(given, quant_type="W8A8")
    processor.weight_activation_process()
    for name in set(weights) - set(given):
        found, wanted = (x[name].astype(np.uint32).view(np.float32) for x in (processor.modelslim_weight_dict, weights))
        assert processor.modelslim_weight_dict[name].dtype == np.int64
        np.testing.assert_allclose(found, wanted, rtol=2**-11, atol=2**-25)  # the tool multiplies in half precision


def genuine_description(mode):
    (description,) = (MSMODELSLIM / mode).glob("quant_model_description*.json")
    return json.loads(description.read_text())


# ---------------------------------------------------------------- norms and the cache


@pytest.mark.parametrize("mode", ["v0/fp16/w8a8_m1", "v0/fp16/w8a8s_lowbit_smooth"])
def test_norms_equal_the_tools(mode):
    weights, description = genuine(mode)
    given = {n: a for n, a in weights.items() if ".module." not in n}
    norms = [n.removesuffix(".module.weight") for n in weights if n.endswith(".module.weight")]
    processor = MSModelSlimWeightProcessor(given, quant_type=description["model_quant_type"], norms=norms)
    processor.anti_outlier_process()
    same(processor.modelslim_weight_dict, weights)
    for norm in norms:
        for part in ("weight", "bias", "module.weight", "module.bias"):
            assert processor.modelslim_description_json[f"{norm}.{part}"] == description[f"{norm}.{part}"]


def test_norms_of_float_layers_are_unchanged():
    smoothed, before = np.full(4, 2, np.float32), np.full(4, 3, np.float32)
    name = "transformer.encoder.layers.0.input_layernorm"
    given = {f"{name}.weight": smoothed, "transformer.encoder.final_layernorm.weight": before}
    processor = MSModelSlimWeightProcessor(given, quant_type="W8A8")
    assert processor.norms == [name]
    processor.anti_outlier_process({f"{name}.weight": before})
    out = processor.modelslim_weight_dict
    assert (out[f"{name}.weight"] == 3).all()
    assert (out[f"{name}.module.weight"] == 2).all()
    assert (out[f"{name}.module.bias"] == 0).all()
    assert len(out) == 5


def test_scales_of_the_cache():
    scale, fused = np.arange(8, dtype=np.float32), "transformer.encoder.layers.0.self_attention.query_key_value"
    processor = MSModelSlimWeightProcessor(
        {
            f"{fused}.kv_cacahe_scale": scale,
            "l.k_proj.kv_cache_scale": scale[:3],
            "l.k_proj.kv_cache_offset": scale[1:4],
        }
    )
    processor.kv_cache_process()
    out, said = processor.modelslim_weight_dict, processor.modelslim_description_json
    assert {n: a.tolist() for n, a in out.items()} == {
        f"{fused}.k_proj.kv_cache_scale": [0, 1, 2, 3],
        f"{fused}.k_proj.kv_cache_offset": [0] * 4,
        f"{fused}.v_proj.kv_cache_scale": [4, 5, 6, 7],
        f"{fused}.v_proj.kv_cache_offset": [0] * 4,
        "l.k_proj.kv_cache_scale": [0, 1, 2],
        "l.k_proj.kv_cache_offset": [1, 2, 3],
    }
    assert set(said) == {"model_quant_type", "kv_cache_type", *out}  # no name of a removed tensor
    assert said["kv_cache_type"] == "C8"


# ---------------------------------------------------------------- mismatched parts


def changed(part, array=None):
    """The dict of a static layer with another part, or without it."""
    given = {
        "a.weight": np.ones((2, 3), np.int8), "a.input_scale": np.ones(1, np.float16),
        "a.input_offset": np.zeros(1, np.float16),
        "a.weight_scale": np.ones((2, 1), np.float16),
    }  # fmt: skip
    return {n: a for n, a in {**given, f"a.{part}": array}.items() if a is not None}


BAD = {
    "no scale": (changed("weight_scale"), "weight_process", "lacks a tensor"),
    "scales of other rows": (changed("weight_scale", np.ones(3, np.float16)), "weight_process",
        "weight_scale does not fit"),
    "scales of integers": (changed("weight_scale", np.ones(2, np.int8)), "weight_process", "weight_scale does not fit"),
    "offset of other rows": (changed("weight_offset", np.ones(3, np.float16)), "weight_process",
        "weight_offset does not fit"),
    "no input scale": (changed("input_scale"), "weight_activation_process", "lacks a tensor"),
    "two input scales": (changed("input_scale", np.ones(2, np.float16)), "weight_activation_process",
        "input_scale does not fit"),
    "deq_scale of half": (changed("deq_scale", np.ones(2, np.float16)), "weight_activation_process",
        "deq_scale does not fit"),
    "deq_scale of 33 bits": (changed("deq_scale", np.full(2, 1 << 32)), "weight_activation_process",
        "more than the bits"),
    "deq_scale negative": (changed("deq_scale", np.full(2, -1)), "weight_activation_process", "more than the bits"),
    "no way to deq_scale": (changed("weight_scale"), "weight_activation_process", "lacks a tensor"),
    "quant_bias of floats": (changed("quant_bias", np.ones(2, np.float32)), "weight_activation_process",
        "quant_bias does not fit"),
    "scale of zero": (changed("bias", np.full(2, np.inf, np.float16)), "weight_activation_process",
        "does not fit 32 bits"),
    "no cache": (changed("bias"), "kv_cache_process", "no cache scale"),
    "cache offsets": ({"a.kv_cache_scale": np.ones(2), "a.kv_cache_offset": np.ones(3)}, "kv_cache_process",
        "does not fit its scale"),
    "odd fused cache": ({"a.qkv_proj.kv_cache_scale": np.ones(3)}, "kv_cache_process", "k and v"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_mismatched_parts_are_reported(case):
    given, step, said = BAD[case]
    processor = MSModelSlimWeightProcessor(given, quant_type="W8A8")
    with pytest.raises(InputError, match=said):
        getattr(processor, step)()


def test_other_refusals(tmp_path):
    with pytest.raises(InputError, match="unknown quant_type"):
        MSModelSlimWeightProcessor({}, quant_type="W8A17")
    with pytest.raises(InputError, match="unsupported number of bits"):
        MSModelSlimWeightProcessor({}, bits=5)
    with pytest.raises(InputError, match="arrays or tensors"):
        MSModelSlimWeightProcessor({"a": [1, 2]})
    with pytest.raises(InputError, match="no static input scale"):
        MSModelSlimWeightProcessor({}).weight_activation_process()
    with pytest.raises(InputError, match="lacks a tensor"):
        MSModelSlimWeightProcessor({}, norms=["x"]).anti_outlier_process()
    fused = "transformer.encoder.layers.0.self_attention.query_key_value"
    silent = {f"{fused}.weight": np.ones((2, 4), np.int8), f"{fused}.weight_scale": np.ones(2, np.float16)}
    with pytest.raises(InputError, match="one code or two"):
        MSModelSlimWeightProcessor(silent).weight_process()
    processor = MSModelSlimWeightProcessor(silent, bits=4)
    processor.weight_process()
    assert processor.modelslim_weight_dict[f"{fused}.weight"].shape == (2, 8)
    with pytest.raises(InputError, match="dtype not supported"):
        MSModelSlimWeightProcessor({"a": np.ones(2, np.complex64)}).save(tmp_path / "x")
    assert not (tmp_path / "x").exists()
