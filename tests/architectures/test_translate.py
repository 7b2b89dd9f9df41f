"""Names, row order and metadata against files of llama.cpp and bitnet.cpp, in both directions."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from golden import VECTORS
from polyquant.architectures import translate
from polyquant.errors import InputError, PlanError, PolyquantError, UnknownNameError
from polyquant.operations import Rows, Same
from polyquant.types import Checkpoint, Kind

MODELS = VECTORS / "models"
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "U8": np.uint8}


@dataclass(frozen=True)
class FakeCodec:
    name: str


@dataclass(frozen=True)
class FakeWeight:
    """The attributes that translation uses: name, shape, codec.name; values for the tests."""

    name: str
    shape: tuple[int, ...]
    codec: FakeCodec
    values: Any = None

    def dequantize(self) -> np.ndarray:
        return self.values


def weight(name: str, *shape: int, codec: str = "bf16", values: Any = None) -> FakeWeight:
    return FakeWeight(name, shape, FakeCodec(codec), values)


def folder(path: Path) -> Checkpoint:
    """A Hugging Face folder, its packed BitNet pairs joined."""
    raw = (path / "model.safetensors").read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = {k: v for k, v in json.loads(raw[8 : 8 + n]).items() if k != "__metadata__"}
    out = {}
    for name, entry in header.items():
        a, b = entry["data_offsets"]
        values = np.frombuffer(raw[8 + n + a : 8 + n + b], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        shape, codec = tuple(entry["shape"]), entry["dtype"].lower()
        if codec == "u8":
            shape, codec = (4 * shape[0], shape[1]), "hf_bitnet.autobitlinear"
        if not name.endswith("weight_scale"):
            out[name] = FakeWeight(name, shape, FakeCodec(codec), values.astype(np.float32))
    files = {p.name: p for p in path.iterdir() if p.suffix != ".safetensors"}
    return Checkpoint("hf", path, out, config=json.loads((path / "config.json").read_text()), files=files)


def decoder(config: dict[str, Any], *extra: FakeWeight, bias: tuple[str, ...] = ()) -> Checkpoint:
    """One layer of some decoder with the usual tensors."""
    c = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 128, "vocab_size": 40, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, **config,
    }  # fmt: skip
    head = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    h, f, q, kv = (
        c["hidden_size"],
        c["intermediate_size"],
        c["num_attention_heads"] * head,
        c["num_key_value_heads"] * head,
    )
    p = "model.layers.0."
    weights = [
        weight("model.embed_tokens.weight", c["vocab_size"], h),
        weight(p + "input_layernorm.weight", h),
        weight(p + "self_attn.q_proj.weight", q, h),
        weight(p + "self_attn.k_proj.weight", kv, h),
        weight(p + "self_attn.v_proj.weight", kv, h),
        weight(p + "self_attn.o_proj.weight", h, q),
        weight(p + "post_attention_layernorm.weight", h),
        weight(p + "mlp.gate_proj.weight", f, h),
        weight(p + "mlp.up_proj.weight", f, h),
        weight(p + "mlp.down_proj.weight", h, f),
        weight("model.norm.weight", h),
        *(weight(f"{p}self_attn.{b}_proj.bias", q if b == "q" else kv) for b in bias),
        *extra,
    ]
    return Checkpoint("hf", Path("/models/some-model"), {w.name: w for w in weights}, config=c)


def back(translation: Any, source: Checkpoint) -> Checkpoint:
    """The GGUF checkpoint that a translation describes."""
    weights = {
        t.target: weight(t.target, *t.shape, codec="f16", values=source[t.source].values) for t in translation.tensors
    }
    weights |= {k: weight(k, *v.shape, codec="f32", values=v) for k, v in translation.constants.items()}
    return Checkpoint(
        "gguf", Path("model.gguf"), weights, metadata={k: v.value for k, v in translation.metadata.items()}
    )


GOLDEN = [
    ("tiny-llama-untied", "tiny-llama-untied-f16.gguf", {}),
    ("tiny-llama-tied", "tiny-llama-tied-Q4_0.gguf", {}),
    ("tiny-bitnet", "tiny-bitnet-TQ1_0.gguf", {"architecture": "bitnet"}),
]


@pytest.mark.parametrize(("model", "file", "options"), GOLDEN)
def test_metadata_equals_the_converter(model, file, options):
    found = translate.to_gguf(folder(MODELS / model / "hf"), **options)
    truth = GGUFReader(MODELS / model / file)
    fields = {k: f for k, f in truth.fields.items() if not k.startswith("GGUF.")}
    fields.pop("general.file_type")
    assert {k: f.contents() for k, f in fields.items()} == {
        k: pytest.approx(v.value, rel=1e-7) if v.kind is Kind.FLOAT32 else v.value for k, v in found.metadata.items()
    }
    for key, field in fields.items():
        kinds = [found.metadata[key].kind.name] + ([found.metadata[key].item.name] if found.metadata[key].item else [])
        assert kinds == [t.name for t in field.types], key
    # llama-quantize moves general.quantization_version to the end; the converter's own file tells the order.
    if file.endswith("f16.gguf"):
        assert list(found.metadata) == list(fields)
    assert found.warnings == ()


@pytest.mark.parametrize(("model", "file", "options"), GOLDEN)
def test_tensor_names_and_shapes_equal_the_converter(model, file, options):
    found = translate.to_gguf(folder(MODELS / model / "hf"), **options)
    truth = {t.name: t for t in GGUFReader(MODELS / model / file).tensors}
    assert {t.target: t.shape for t in found.tensors} == {
        n: tuple(int(x) for x in t.shape[::-1]) for n, t in truth.items()
    }
    assert {t.target for t in found.tensors if t.keep_float} == {
        n for n, t in truth.items() if t.tensor_type.name == "F32"
    }


def test_tensor_order_equals_the_converter():
    found = translate.to_gguf(folder(MODELS / "tiny-llama-untied/hf"))
    truth = GGUFReader(MODELS / "tiny-llama-untied/tiny-llama-untied-f16.gguf").tensors
    assert [t.target for t in found.tensors] == [t.name for t in truth]


def test_rows_are_ordered_like_the_converter():
    source = folder(MODELS / "tiny-llama-untied/hf")
    truth = {t.name: t.data for t in GGUFReader(MODELS / "tiny-llama-untied/tiny-llama-untied-f16.gguf").tensors}
    moved = 0
    for t in translate.to_gguf(source).tensors:
        rows = source[t.source].values
        if isinstance(t.op, Rows):
            moved += 1
            rows = rows[t.op.order]
        np.testing.assert_array_equal(rows.astype(truth[t.target].dtype), truth[t.target])
    assert moved == 4  # q and k of two layers


def test_ternarized_tensors_equal_the_converter():
    source = folder(MODELS / "tiny-bitnet/hf")
    truth = {t.name: t for t in GGUFReader(MODELS / "tiny-bitnet/tiny-bitnet-TQ1_0.gguf").tensors}
    found = [t for t in translate.to_gguf(source, architecture="bitnet").tensors if t.ternarize]
    assert len(found) == 14
    for t in found:
        w = source[t.source].values
        codes = np.clip(np.rint(w / np.abs(w).mean()), -1, 1)
        stored = dequantize(truth[t.target].data, truth[t.target].tensor_type)
        np.testing.assert_array_equal(np.sign(stored), codes)


def test_packed_bitnet_equals_bitnet_cpp():
    found = translate.to_gguf(folder(VECTORS / "bitnet_gguf/hf_packed_autobitlinear"))
    assert found.architecture == "bitnet-b1.58"
    assert not any(t.ternarize or isinstance(t.op, Rows) for t in found.tensors)
    # Names and sizes as in tests/vectors/bitnet_gguf/tiny-bitnet-b158-i2_s-x86_128.gguf, whose types gguf-py cannot
    # read.
    raw = (VECTORS / "bitnet_gguf/tiny-bitnet-b158-i2_s-x86_128.gguf").read_bytes()
    for t in found.tensors:
        name = t.target.encode()
        entry = len(name).to_bytes(8, "little") + name + len(t.shape).to_bytes(4, "little")
        assert entry + b"".join(n.to_bytes(8, "little") for n in reversed(t.shape)) in raw, t.target
    for key, value in found.metadata.items():
        if not key.startswith(("tokenizer.", "general.")):
            assert len(key).to_bytes(8, "little") + key.encode() + int(value.kind).to_bytes(4, "little") in raw, key


@pytest.mark.parametrize(("model", "file", "options"), GOLDEN)
def test_round_trip(model, file, options):
    source = folder(MODELS / model / "hf")
    there = translate.to_gguf(source, **options)
    again = translate.to_hf(back(there, source), dtype=source.config["dtype"])
    orders = {t.target: getattr(t.op, "order", None) for t in there.tensors}
    assert {t.target: t.shape for t in again.tensors} == {w.name: w.shape for w in source.values()}
    for t in again.tensors:
        if isinstance(t.op, Rows):
            np.testing.assert_array_equal(orders[t.source][t.op.order], np.arange(t.shape[0]))
    assert sum(isinstance(t.op, Rows) for t in again.tensors) == sum(o is not None for o in orders.values())
    config = json.loads(again.files["config.json"])
    silent = {"attention_dropout", "initializer_range", "pretraining_tp", "transformers_version", "hidden_act"}
    for key, value in source.config.items():
        if key not in silent and not (key == "mlp_bias" and key not in config):
            assert config[key] == value, key
    assert (config["rope_theta"], config["torch_dtype"]) == (config["rope_parameters"]["rope_theta"], config["dtype"])
    assert config["hidden_act"] == "silu"  # the architecture `bitnet` uses SiLU, regardless of the source
    generation = json.loads(again.files["generation_config.json"])
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (0, 1, 2)
    assert again.warnings == ()


def test_golden_gguf_to_hf():
    """The tensors of a real GGUF, not of our own translation, become the folder's names."""
    truth = GGUFReader(MODELS / "tiny-llama-untied/tiny-llama-untied-f16.gguf")
    source = folder(MODELS / "tiny-llama-untied/hf")
    weights = {t.name: weight(t.name, *(int(x) for x in t.shape[::-1]), values=t.data) for t in truth.tensors}
    metadata = {k: f.contents() for k, f in truth.fields.items()}
    found = translate.to_hf(Checkpoint("gguf", Path("m.gguf"), weights, metadata=metadata))
    for t in found.tensors:
        rows = weights[t.source].values
        rows = rows if isinstance(t.op, Same) else rows[t.op.order]
        np.testing.assert_array_equal(rows, source[t.target].values.astype(rows.dtype))


@pytest.mark.parametrize("spelling", ["old", "new"])
def test_old_and_new_tensor_names_of_transformers(spelling):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0}
    if spelling == "new":
        config = {"rope_parameters": {**rope, "rope_theta": 1e6}, "dtype": "bfloat16"}
    else:
        config = {"rope_scaling": {**rope, "type": rope["rope_type"]}, "rope_theta": 1e6, "torch_dtype": "bfloat16"}
    source = decoder({"model_type": "qwen3", "head_dim": 32, **config})
    found = translate.to_gguf(source, with_tokenizer=False)
    said = {k.removeprefix("qwen3."): v.value for k, v in found.metadata.items() if k.startswith("qwen3.")}
    assert said == {
        "block_count": 1, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32, "rope.scaling.yarn_beta_fast": 32.0, "rope.freq_base": 1e6,
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.key_length": 32, "attention.value_length": 32,
    }  # fmt: skip
    config = json.loads(translate.to_hf(back(found, source)).files["config.json"])
    assert config["rope_parameters"] == {**rope, "rope_theta": 1e6}
    assert config["rope_scaling"] == rope
    assert config["head_dim"] == 32


@pytest.mark.parametrize(
    ("kind", "extra", "bias", "expected"),
    [
        ("qwen2", (), ("q", "k", "v"), {"blk.0.attn_q.bias", "blk.0.attn_k.bias", "blk.0.attn_v.bias"}),
        (
            "qwen3",
            (
                weight("model.layers.0.self_attn.q_norm.weight", 16),
                weight("model.layers.0.self_attn.k_norm.weight", 16),
            ),
            (),
            {"blk.0.attn_q_norm.weight", "blk.0.attn_k_norm.weight"},
        ),
    ],
)
def test_qwen(kind, extra, bias, expected):
    source = decoder({"model_type": kind}, *extra, bias=bias)
    found = translate.to_gguf(source, with_tokenizer=False)
    by_name = {t.target: t for t in found.tensors}
    assert found.architecture == kind
    assert expected <= set(by_name)
    assert all(by_name[n].keep_float for n in expected)
    assert all(isinstance(t.op, Same) for t in found.tensors)
    again = translate.to_hf(back(found, source))
    assert {t.target for t in again.tensors} == set(source)
    assert json.loads(again.files["config.json"])["architectures"] == [
        {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
    ]


def test_llama_biases_are_permuted_like_their_rows():
    found = translate.to_gguf(decoder({"model_type": "mistral"}, bias=("q", "k")), with_tokenizer=False)
    order = {t.target: getattr(t.op, "order", None) for t in found.tensors}
    assert found.architecture == "llama"
    # Four heads of 16: the first head's rows 0, 8, 1, 9, ...
    assert order["blk.0.attn_q.bias"][:4].tolist() == [0, 8, 1, 9]
    for part, heads in (("q", 4), ("k", 2)):
        np.testing.assert_array_equal(order[f"blk.0.attn_{part}.bias"], order[f"blk.0.attn_{part}.weight"])
        x = np.arange(heads * 16)
        np.testing.assert_array_equal(
            x[order[f"blk.0.attn_{part}.bias"]], x.reshape(heads, 2, 8).swapaxes(1, 2).reshape(-1)
        )


def test_a_head_equal_to_the_embedding_is_dropped():
    found = translate.to_gguf(decoder({"model_type": "llama"}, weight("lm_head.weight", 40, 64)), with_tokenizer=False)
    assert "output.weight" not in {t.target for t in found.tensors}
    assert "tie_word_embeddings" in found.dropped["lm_head.weight"]


def test_computed_tensors_are_dropped():
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    found = translate.to_gguf(decoder({"model_type": "llama"}, weight(name, 8)), with_tokenizer=False)
    assert list(found.dropped) == [name]


def test_llama3_rope_becomes_a_tensor_and_round_trips():
    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
    source = decoder({"model_type": "llama", "head_dim": 64, "rope_scaling": rope, "rope_theta": 500000.0})
    found = translate.to_gguf(source, with_tokenizer=False)
    factors = found.constants["rope_freqs.weight"]
    assert factors.dtype == np.float32
    assert factors.shape == (32,)
    # The definition, wave by wave: short ones as they are, long ones divided by the factor, a blend in between.
    expected = []
    for i in range(32):
        wave = 2 * math.pi * 500000.0 ** (2 * i / 64)
        smooth = (8192 / wave - 1.0) / (4.0 - 1.0)
        blend = 1 / ((1 - smooth) / 32.0 + smooth)
        expected.append(1.0 if wave < 8192 / 4.0 else 32.0 if wave > 8192 / 1.0 else blend)
    np.testing.assert_allclose(factors, expected, rtol=1e-6)
    assert 1.0 < factors[16] < 32.0
    again = translate.to_hf(back(found, source))
    assert json.loads(again.files["config.json"])["rope_scaling"] == rope
    assert "rope_freqs.weight" not in {t.source for t in again.tensors}
    strange = back(found, source)
    strange.weights["rope_freqs.weight"] = weight(
        "rope_freqs.weight", 32, values=np.linspace(1, 9, 32, dtype=np.float32)
    )
    assert any("rope_freqs" in w for w in translate.to_hf(strange).warnings)


def test_1bitllm_names_and_architecture():
    p = "model.layers.0."
    extra = (weight(p + "self_attn.inner_attn_ln.weight", 64), weight(p + "mlp.ffn_layernorm.weight", 96))
    found = translate.to_gguf(
        decoder({"model_type": "llama", "architectures": ["BitnetForCausalLM"]}, *extra), with_tokenizer=False
    )
    assert found.architecture == "bitnet"
    assert {"blk.0.attn_sub_norm.weight", "blk.0.ffn_sub_norm.weight"} <= {t.target for t in found.tensors}
    assert found.metadata["bitnet.rope.scaling.factor"].value == 1.0


def test_ternary_llama_master_weights():
    config = {"model_type": "llama", "quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"}}
    found = translate.to_gguf(decoder(config), with_tokenizer=False)
    assert sum(t.ternarize for t in found.tensors) == 7
    assert not any(
        t.ternarize for t in translate.to_gguf(decoder({"model_type": "llama"}), with_tokenizer=False).tensors
    )


def test_unknown_architecture_keeps_its_names():
    source = decoder({"model_type": "mamba"}, weight("model.layers.0.mixer.A_log", 8))
    found = translate.to_gguf(source, with_tokenizer=False)
    assert [t.target for t in found.tensors] == list(source)
    assert found.metadata["general.architecture"].value == "mamba"
    assert "unknown" in found.unknown[0]
    again = translate.to_hf(back(found, source))
    assert [t.target for t in again.tensors] == list(source)
    assert "unknown" in again.unknown[0]
    assert json.loads(again.files["config.json"])["model_type"] == "mamba"


def test_unknown_and_missing_tensors_are_reported():
    found = translate.to_gguf(
        decoder({"model_type": "llama", "num_hidden_layers": 2}, weight("vision.x", 4, 4)), with_tokenizer=False
    )
    assert "vision.x" in {t.target for t in found.tensors}
    assert "vision.x" in found.unknown[0]
    assert "blk.1." in found.unknown[1]


def test_aliases_of_other_converters():
    weights = {w.name: w for w in (weight("token_embd.weight", 10, 64), weight("output_norm.weight", 64))}
    metadata = {
        "general.architecture": "bitnet-b1.58", "n_layers": 30, "num_attention_heads": 20, "n_kv_heads": 5,
        "n_embd": 2560,
        "intermediate_size": 6912, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    }  # fmt: skip
    config = json.loads(
        translate.to_hf(Checkpoint("gguf", Path("m.gguf"), weights, metadata=metadata)).files["config.json"]
    )
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["hidden_act"]) == (30, 5, "relu2")
    assert (config["hidden_size"], config["head_dim"], config["vocab_size"]) == (2560, 128, 10)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": "many"},
        {"num_hidden_layers": True},
        {"num_hidden_layers": 0},
        {"hidden_size": 66},
        {"num_attention_heads": -4},
        {"num_key_value_heads": 3},
        {"head_dim": 7},
        {"head_dim": 32},  # the rows of q say 16
        {"rope_theta": float("nan")},
        {"rms_norm_eps": "1e-5"},
        {"intermediate_size": None},
        {"rope_scaling": [1]},
        {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": float("inf")}},
        {"rope_scaling": {"rope_type": 7}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "8k"}},
    ],
)
def test_invalid_configurations(wrong):
    source = decoder({"model_type": "llama"})
    bad = Checkpoint("hf", source.path, source.weights, config={**source.config, **wrong})
    with pytest.raises(InputError) as e:
        translate.to_gguf(bad, with_tokenizer=False)
    assert "\n" not in str(e.value)


def test_two_tensors_for_one_name():
    with pytest.raises(InputError, match="two tensors"):
        translate.to_gguf(decoder({"model_type": "llama"}, weight("norm.weight", 64)), with_tokenizer=False)


def test_unknown_target_architecture_suggests_similar_ones():
    with pytest.raises(UnknownNameError, match=r"bitnet-b1\.58"):
        translate.to_gguf(decoder({"model_type": "bitnet"}), architecture="bitnet-b158")


def test_converting_between_families_is_refused():
    with pytest.raises(PlanError, match="qwen2"):
        translate.to_gguf(decoder({"model_type": "llama"}), architecture="qwen2")


@pytest.mark.parametrize(
    ("codec", "dtype"), [("f32", "float32"), ("f16", "float16"), ("bf16", "bfloat16"), ("q4_k", "bfloat16")]
)
def test_dtype_of_the_configuration(codec, dtype):
    source = back(
        translate.to_gguf(decoder({"model_type": "llama"}), with_tokenizer=False), decoder({"model_type": "llama"})
    )
    weights = {n: weight(n, *w.shape, codec=codec) for n, w in source.items()}
    found = translate.to_hf(
        Checkpoint("gguf", source.path, weights, metadata=source.metadata), quantization_config={"a": 1}
    )
    config = json.loads(found.files["config.json"])
    assert (config["dtype"], config["torch_dtype"], config["quantization_config"]) == (dtype, dtype, {"a": 1})


def test_gguf_names_that_collide():
    source = decoder({"model_type": "llama"})
    there = back(translate.to_gguf(source, with_tokenizer=False), source)
    there.weights["blk.00.attn_norm.weight"] = weight("blk.00.attn_norm.weight", 64)
    with pytest.raises(InputError, match="two tensors"):
        translate.to_hf(there)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=8),
    lambda x: (
        st.lists(x, max_size=3)
        | st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta", "x"]), x, max_size=3)
    ),
    max_leaves=8,
)
KEYS = [
    "architectures", "model_type", "head_dim", "hidden_size", "num_attention_heads", "num_key_value_heads",
    "num_hidden_layers",
    "rope_scaling", "rope_parameters", "rope_theta", "rms_norm_eps", "sliding_window", "tie_word_embeddings",
    "vocab_size",
    "original_max_position_embeddings", "quantization_config", "_name_or_path", "bos_token_id", "eos_token_id",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4))
@settings(max_examples=150, deadline=None)
def test_any_configuration_gives_a_translation_or_one_error(wrong):
    source = decoder({"model_type": "llama"})
    try:
        there = translate.to_gguf(Checkpoint("hf", source.path, source.weights, config={**source.config, **wrong}))
        translate.to_hf(back(there, source))
    except PolyquantError as e:
        assert "\n" not in str(e)


@cache
def tied_gguf() -> Checkpoint:
    source = folder(MODELS / "tiny-llama-tied/hf")
    return back(translate.to_gguf(source), source)


META = [
    "general.architecture", "llama.block_count", "llama.attention.head_count", "llama.attention.key_length",
    "llama.rope.freq_base",
    "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scaling.original_context_length",
    "llama.vocab_size",
    "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.scores",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.add_bos_token", "tokenizer.chat_template",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(META), JSON, max_size=4))
@settings(max_examples=150, deadline=None)
def test_any_metadata_gives_a_translation_or_one_error(wrong):
    there = tied_gguf()
    try:
        translate.to_hf(Checkpoint("gguf", there.path, there.weights, metadata={**there.metadata, **wrong}))
    except PolyquantError as e:
        assert "\n" not in str(e)


def test_gguf_without_architecture():
    with pytest.raises(InputError, match=r"general\.architecture"):
        translate.to_hf(Checkpoint("gguf", Path("m.gguf"), {}))


@pytest.mark.parametrize(
    ("path", "config", "title"),
    [
        ("/models/tiny-llama-7B-v0.3", {}, "Tiny Llama 7B v0.3"),
        ("/models/x", {"_name_or_path": "org/Qwen3-0.6B"}, "Qwen3 0.6B"),
        ("/cache/models--org--nice-model/snapshots/0123abc", {}, "Nice Model"),
    ],
)
def test_the_models_name(path, config, title):
    source = decoder({"model_type": "llama", **config})
    named = Checkpoint("hf", Path(path), source.weights, config=source.config)
    assert translate.to_gguf(named, with_tokenizer=False).metadata["general.name"].value == title
