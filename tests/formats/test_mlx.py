"""MLX folders: those of mlx-lm read bit for bit, codes kept in both directions, invalid folders rejected."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import hub_vectors
import polyquant
from architectures.golden_models import Golden
from architectures.mlx_folders import mlx_folder
from polyquant.architectures.mlx_writing import mlx_layout
from polyquant.errors import InputError, PolyquantError, UnsupportedError
from polyquant.formats.huggingface import check
from polyquant.opening import open_checkpoint
from polyquant.runtime.load import load
from polyquant.types import Action, TensorMap

BF16 = ml_dtypes.bfloat16
HASHES = hub_vectors.hashes("mlx")
UP = "model.layers.0.mlp.up_proj"
MODELS = "tests/vectors/models/tiny-llama-untied"


def as_mlx_rounds(weight):
    """mlx's two roundings to bfloat16: of code * scale, then of the sum with the bias."""
    codes = weight.codec.unpack(weight.parts, weight.shape)
    levels = (codes.codes.astype(np.int16) + 2 ** (codes.bits - 1)).astype(np.float32)
    scale, bias = (np.repeat(table, weight.codec.group, 1) for table in (codes.scale, codes.bias))
    return hub_vectors.rounded(hub_vectors.rounded(levels * scale) + bias)


@pytest.mark.parametrize("case", [c for c in HASHES if "affine" in c])
def test_folders_of_mlx(case):
    """Equal to mlx.core.dequantize of every weight; packing gives the bytes back."""
    found = open_checkpoint(hub_vectors.folder(case))
    assert found.undecoded is None
    for name, digest in HASHES[case].items():
        weight = found[name]
        assert weight.codec.name.startswith("mlx."), name
        values = as_mlx_rounds(weight)
        assert hub_vectors.digest(values) == digest, name
        np.testing.assert_allclose(weight.dequantize(), values, rtol=0, atol=2.0**-7 * np.abs(values).max())
        packed = weight.codec.pack(weight.codec.unpack(weight.parts, weight.shape))
        assert all(np.array_equal(packed[part], weight.parts[part]) for part in packed)


@pytest.mark.parametrize("case", [c for c in HASHES if "affine" not in c])
def test_folders_of_small_floats(case):
    found = open_checkpoint(hub_vectors.folder(case))
    for name, digest in HASHES[case].items():
        weight = found[name]
        assert weight.codec.name == case.replace("mlx-", "mlx."), name
        assert hub_vectors.digest(weight.dequantize()) == digest, name
        packed = weight.codec.pack(weight.codec.unpack(weight.parts, weight.shape))
        assert all(np.array_equal(packed[part], weight.parts[part]) for part in packed)


@pytest.mark.parametrize(
    "case", ["mlx-affine-b4-g32-odd", "mlx-affine-mixed36-g64", "mlx-affine-b4-g64-partial", "mlx-mxfp4"]
)
def test_logits_of_mlx(tmp_path, case):
    tokens, want = hub_vectors.logits(case)
    path = shutil.copytree(hub_vectors.folder(case), tmp_path / "m")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] == "qwen2":  # mlx-lm 0.32.2 ignores rope_parameters there
        config["rope_parameters"]["rope_theta"] = 1e6
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found = load(path, activations="float").logits(tokens.tolist())
    assert np.abs(found - want).max() < 0.04 * np.abs(want).max()  # mlx computes in bfloat16
    assert np.square(found - want).mean() < 5e-4 * np.square(want).mean()


def test_layers_differ_as_config_says():
    found = open_checkpoint(hub_vectors.folder("mlx-affine-b4-g64-partial"))
    assert found["model.layers.0.mlp.down_proj.weight"].codec.name == "mlx.8.g32"
    assert found[f"{UP}.weight"].codec.name == "mlx.4.g64"
    assert found["lm_head.weight"].codec.name == found["model.embed_tokens.weight"].codec.name == "bf16"
    assert [f.code for f in check.check(found.path) if f.severity.name != "NOTE"] == ["HF030"]  # no tokenizer


# ---------------------------------------------------------------- codes kept


@pytest.mark.parametrize(
    ("quant", "codec"), [("Q4_0", "mlx.4.g32.f16"), ("Q8_0", "mlx.8.g32.f16")]
)  # fmt: skip
def test_gguf_to_mlx_and_back(tmp_path, quant, codec):
    source = f"{MODELS}/tiny-llama-untied-{quant}.gguf"
    plan = polyquant.plan(source, to="mlx")
    kept = [s for s in plan.steps if s.target.name == codec]
    assert len(kept) >= 15
    assert {(s.action, s.streams) for s in kept} == {(Action.TRANSCODE, True)}
    assert {s.source.name for s in plan.steps if s.action is Action.DEQUANTIZE} <= {"q6_k"}
    polyquant.convert(source, tmp_path / "mlx", to="mlx")
    polyquant.convert(tmp_path / "mlx", tmp_path / "back.gguf")
    first, middle, last = (open_checkpoint(p) for p in (source, tmp_path / "mlx", tmp_path / "back.gguf"))
    assert first["token_embd.weight"].codec.name == last["token_embd.weight"].codec.name == quant.lower()
    name = "model.layers.1.mlp.down_proj.weight"
    assert np.array_equal(middle[name].dequantize(), first["blk.1.ffn_down.weight"].dequantize())
    for name, weight in first.items():
        if weight.codec.name == quant.lower():
            assert np.array_equal(weight.parts["blocks"], last[name].parts["blocks"]), name


@pytest.mark.parametrize("codec", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_blocks_of_ggml_become_equal_floats(codec):
    w = np.random.default_rng(3).standard_normal((64, 128)).astype(np.float32)
    source = polyquant.codec(codec)
    parts = source.pack(source.quantize(w))
    blocks = polyquant.codecs.affine_forms.affine_of(source, parts, w.shape)
    target = polyquant.codec(f"mlx.{blocks.bits}.g32.f16")
    packed = polyquant.codecs.affine_forms.recoded(blocks, target)
    assert np.array_equal(target.dequantize(packed, w.shape), source.dequantize(parts, w.shape))
    back = polyquant.codecs.affine_forms.recoded(target.unpack(packed, w.shape), source)
    assert np.array_equal(back["blocks"], parts["blocks"])


@pytest.mark.parametrize("scheme", ["gptq", "awq", "compressed-tensors"])
def test_integers_of_other_tools_and_back(tmp_path, scheme):
    """Biases are minus a zero point times the scale: exact in float32, and the zero points come back."""
    polyquant.quantize(f"{MODELS}/hf", tmp_path / "a", to=scheme)
    plan = polyquant.plan(tmp_path / "a", to="mlx")
    assert all(s.action is Action.TRANSCODE for s in plan.steps if "proj" in s.map.target)
    polyquant.convert(tmp_path / "a", tmp_path / "mlx", to="mlx")
    polyquant.convert(tmp_path / "mlx", tmp_path / "b", to=scheme)
    a, m, b = (open_checkpoint(tmp_path / x) for x in ("a", "mlx", "b"))
    for name, weight in a.items():
        np.testing.assert_allclose(m[name].dequantize(), weight.dequantize(), rtol=3e-7, atol=1e-7)
        if "proj" in name:
            np.testing.assert_array_equal(b[name].dequantize(), weight.dequantize(), err_msg=name)


def test_codes_of_mlx_that_others_cannot_hold_are_refused(tmp_path):
    with pytest.raises(PolyquantError, match="requantize"):
        polyquant.plan(hub_vectors.folder("mlx-affine-mixed36-g64"), to="awq")


# ---------------------------------------------------------------- quantizing


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_never_worse_than_the_grid_of_mlx(bits):
    from polyquant.codecs.keeping import Integers
    from polyquant.quantizers import grouped

    rng = np.random.default_rng(bits)
    w = rng.standard_normal((64, 256)).astype(np.float32)
    w[3] *= 40 * (rng.random(256) < 0.02)
    w[4] = 0.5
    w[5] = np.abs(w[5])
    w[6] = 0
    traits = Integers(bits, 64, "bf16", "bias")
    cells, ones = w.reshape(64, 4, 64), np.ones((4, 64), np.float32)
    own = grouped._of_mlx(traits, cells.max(2), cells.min(2))
    wanted = grouped._error(traits, cells, own, ones)
    codec = polyquant.codec(f"mlx.{bits}.g64")
    back = codec.dequantize(codec.pack(codec.quantize(w)), w.shape).reshape(cells.shape)
    assert (np.square(back - cells).sum(2) <= wanted * 1.00001).all()


def test_written_config(tmp_path):
    rule = polyquant.Rule("model.layers.0.*", "mlx.8.g32")
    polyquant.quantize(f"{MODELS}/hf", tmp_path / "q", to="mlx", rules=[rule, polyquant.Rule("lm_head*", "bf16")])
    config = json.loads((tmp_path / "q/config.json").read_text(encoding="utf-8"))
    described = config["quantization"]
    assert config["quantization_config"] == described
    assert {k: v for k, v in described.items() if "." not in k} == {
        "group_size": 64, "bits": 4, "mode": "affine", "lm_head": False,
    }  # fmt: skip
    assert described[UP] == {"group_size": 32, "bits": 8, "mode": "affine"}
    assert all(k.startswith("model.layers.0.") for k in described if "." in k)
    found = open_checkpoint(tmp_path / "q")
    assert found["model.embed_tokens.weight"].codec.name == "mlx.4.g64"
    assert not [f for f in check.check(found.path) if f.severity.name != "NOTE"]


# ---------------------------------------------------------------- stacks of experts


@pytest.mark.parametrize("codec", ["mlx.8.g32", "mlx.mxfp8"])
def test_stacks_of_experts(tmp_path, codec):
    floats = mlx_folder(Golden("qwen3_moe"), tmp_path / "floats")
    polyquant.quantize(floats, tmp_path / "q", to="mlx", codec=codec)
    found = open_checkpoint(tmp_path / "q")
    name = "model.layers.0.mlp.switch_mlp.down_proj.weight"
    stack, experts = found[name], open_checkpoint(floats)[name]
    assert stack.codec.name == codec
    assert stack.shape == experts.shape
    np.testing.assert_allclose(stack.dequantize(), experts.dequantize(), atol=0.01 if "8.g" in codec else 0.1)
    tokens = Golden("qwen3_moe").logits()["tokens"].tolist()
    got = load(tmp_path / "q", activations="float").logits(tokens)
    polyquant.convert(tmp_path / "q", tmp_path / "decoded", to="hf", codec="f32")
    want = load(tmp_path / "decoded", activations="float").logits(tokens)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())


JOINED = {  # model -> a layer's stacks in mlx-lm; transformers joins gate and up, and stores Llama 4's transposed
    "granitemoehybrid": "model.layers.0.block_sparse_moe.switch_mlp", "gemma4": "model.layers.0.experts.switch_glu",
    "llama4": "model.layers.1.feed_forward.experts",
}  # fmt: skip


@pytest.mark.parametrize("name", JOINED)
def test_joined_experts_are_split_and_quantized(tmp_path, name):
    golden, stem, codec = Golden(name), JOINED[name], "mlx.8.g32.f32"
    report = polyquant.quantize(golden.folder, tmp_path / "q", to="mlx", codec=codec)
    assert not report.warnings
    found = open_checkpoint(tmp_path / "q")
    stacks = [found[f"{stem}.{part}_proj.weight"] for part in ("gate", "up", "down")]
    assert {w.codec.name for w in stacks} == {codec}
    joined = [w for n, w in open_checkpoint(golden.folder).items() if len(w.shape) == 3 and stem[:16] in n]
    (both, down) = sorted((w for w in joined if "conv" not in w.name), key=lambda w: "gate_up" not in w.name)
    if "input_linear" in down.name:
        both, down = down, both
    want = both.dequantize().swapaxes(1, 2) if name == "llama4" else both.dequantize()
    halves = [*np.split(want, 2, 1), down.dequantize().swapaxes(1, 2) if name == "llama4" else down.dequantize()]
    for stack, floats in zip(stacks, halves, strict=True):
        np.testing.assert_allclose(stack.dequantize(), floats, atol=0.01 * np.abs(floats).max())
    polyquant.convert(golden.folder, tmp_path / "m.gguf", codec="f32")
    polyquant.quantize(tmp_path / "m.gguf", tmp_path / "g", to="mlx", codec=codec)
    again = open_checkpoint(tmp_path / "g")
    for stack in stacks:
        np.testing.assert_array_equal(again[stack.name].dequantize(), stack.dequantize())


def test_joined_experts_of_qwen():
    config = json.loads((Golden("qwen3_5_moe").folder / "config.json").read_text(encoding="utf-8"))
    layer = "model.layers.0.mlp"
    shapes = {f"{layer}.experts.gate_up_proj": (4, 64, 32), f"{layer}.experts.down_proj": (4, 32, 32)}
    made = mlx_layout([TensorMap(name, (name,), shape) for name, shape in shapes.items()], config)
    assert {t.target: t.shape for t in made} == {
        f"{layer}.switch_mlp.{part}_proj.weight": (4, 32, 32) for part in ("gate", "up", "down")
    }
    x = np.arange(4 * 64 * 32, dtype=np.float32).reshape(4, 64, 32)
    for tensor, want in zip(made, np.split(x, 2, 1), strict=False):
        np.testing.assert_array_equal(tensor.op.reference([x]), want)


def test_experts_of_gpt_oss_keep_their_codes(tmp_path):
    golden = Golden("gpt_oss_mxfp4")
    polyquant.convert(golden.folder, tmp_path / "oss.gguf", to="gguf")
    for source in (golden.folder, tmp_path / "oss.gguf"):
        target = tmp_path / source.name.replace(".", "-")
        plan = polyquant.plan(source, to="mlx")
        kept = [s for s in plan.steps if s.target.name == "mlx.mxfp4"]
        assert {s.map.target.split(".")[-2] for s in kept} == {"gate_proj", "up_proj", "down_proj"}
        assert {s.action for s in kept} == {Action.TRANSCODE}
        polyquant.convert(source, target, to="mlx")
        before, after = open_checkpoint(golden.folder), open_checkpoint(target)
        stack = before["model.layers.0.mlp.experts.gate_up_proj_blocks"].dequantize()
        for i, name in enumerate(("gate_proj", "up_proj")):
            found = after[f"model.layers.0.mlp.experts.{name}.weight"]
            np.testing.assert_array_equal(found.dequantize(), stack[:, i::2])
        tokens = golden.logits()["tokens"].tolist()
        want = load(golden.folder, activations="float").logits(tokens)
        np.testing.assert_allclose(load(target, activations="float").logits(tokens), want, atol=1e-4)


# ---------------------------------------------------------------- bad input


def damaged(tmp_path, change, description=None):
    """A folder of one 4-bit layer [64, 128], g64, after `change(tensors, config)`."""
    words = np.random.default_rng(1).integers(0, 2**32, (64, 16), np.uint32)
    table = np.ones((64, 2), BF16)
    tensors = {f"{UP}.weight": words, f"{UP}.scales": table, f"{UP}.biases": table}
    config = {"model_type": "llama", "quantization": {"bits": 4, "group_size": 64, "mode": "affine"}}
    change(tensors, config)
    path = tmp_path / "bad"
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def setting(**values):
    return lambda tensors, config: config["quantization"].update(values)


def part(name, array):
    return lambda tensors, config: tensors.update({f"{UP}.{name}": array})


BAD = {
    "7 bits": (setting(bits=7), "codes that MLX does not have"),
    "64 bits": (setting(bits=64), "codes that MLX does not have"),
    "no bits": (setting(bits=0), "codes that MLX does not have"),
    "negative bits": (setting(bits=-4), "codes that MLX does not have"),
    "group 0": (setting(group_size=0), "codes that MLX does not have"),
    "group -1": (setting(group_size=-1), "codes that MLX does not have"),
    "group 7": (setting(group_size=7), "codes that MLX does not have"),
    "huge group": (setting(group_size=1 << 80), "codes that MLX does not have"),
    "other bits": (setting(bits=8), "scales does not fit the weight"),
    "other groups": (setting(group_size=32), "scales does not fit the weight"),
    "3 bits": (setting(bits=3), "weight has an unexpected shape"),
    "entry is a number": (setting(**{UP: 5}), "no description"),
    "entry is false": (setting(**{UP: False}), "no description"),
    "entry without bits": (setting(**{UP: {"group_size": 64}}), "codes that MLX does not have"),
    "no biases": (lambda t, c: t.pop(f"{UP}.biases"), "lacks biases"),
    "few scales": (part("scales", np.ones((64, 1), BF16)), "scales does not fit"),
    "scales of one row": (part("scales", np.ones((1, 2), BF16)), "scales does not fit"),
    "float32 biases": (part("biases", np.ones((64, 2), np.float32)), "biases does not fit"),
    "integer scales": (part("scales", np.ones((64, 2), np.int8)), "unsupported dtype"),
    "a vector": (part("weight", np.ones(16, np.uint32)), "weight has an unexpected shape"),
    "empty": (part("weight", np.ones((0, 16), np.uint32)), "weight has an unexpected shape"),
    "bits of another mode": (setting(mode="mxfp4"), "4 bits in groups of 32 for mode mxfp4"),
    "scales of another mode": (setting(mode="mxfp4", group_size=32), "scales does not fit"),
    "tensor scale": (
        lambda t, c: (setting(mode="nvfp4", group_size=16)(t, c), part("global_scale", np.ones(1, np.float32))(t, c)),
        "scale of the tensor",
    ),
    "four dimensions": (part("weight", np.ones((2, 2, 16, 16), np.uint32)), "weight has an unexpected shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folders(tmp_path, name):
    change, message = BAD[name]
    path = damaged(tmp_path, change)
    with pytest.raises(InputError, match=message) as e:
        open_checkpoint(path)
    assert str(e.value).isprintable()
    assert "HF063" in [f.code for f in check.check(path)]
    with pytest.raises(PolyquantError):
        polyquant.convert(path, tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()


def test_unknown_modes_are_shown_and_not_decoded(tmp_path):
    path = damaged(tmp_path, setting(**{UP: {"bits": 4, "group_size": 64, "mode": "fp9"}}))
    with pytest.raises(UnsupportedError, match="MLX 4-bit fp9, group 64"):
        open_checkpoint(path)


def test_descriptions(tmp_path):
    """Only `quantization_config`, and an entry `true`."""

    def repeated(tensors, config):
        config["quantization_config"] = config.pop("quantization") | {UP: True}

    found = open_checkpoint(damaged(tmp_path, repeated))
    assert found[f"{UP}.weight"].codec.name == "mlx.4.g64"


@pytest.mark.parametrize("value", [None, 3, "x", [], {"bits": "4"}, {"bits": 4}, {"bits": 4.0, "group_size": 64}])
def test_descriptions_of_another_type(tmp_path, value):
    path = damaged(tmp_path, lambda t, c: c.update(quantization=value))
    with pytest.raises(UnsupportedError, match="MLX codes, U32 with scales"):
        open_checkpoint(path)
