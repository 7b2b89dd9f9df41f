"""Logits of the tiny models against transformers, llama.cpp and exact arithmetic.

tests/vectors/models/README.md describes the arrays.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import polyquant as pq
from golden import VECTORS, arrays

MODELS = VECTORS / "models"
QUANTIZED = sorted(p for p in MODELS.glob("*/*.gguf") if not p.stem.endswith("f16"))
BITNETS: dict[str, dict[str, Any]] = {
    "models/tiny-bitnet/hf": {},
    "bitnet_gguf/hf_packed_autobitlinear": {},
    "bitnet_gguf/hf_packed_bitlinear": {},
    "bitnet_gguf/tiny-bitnet-b158-i2_s-x86_128.gguf": {"ternary_layout": "i2_s.x86"},
    "bitnet_gguf/tiny-bitnet-b158-i2_s-arm_64.gguf": {"ternary_layout": "i2_s.arm"},
    "bitnet_gguf/tiny-bitnet-b158-tl1.gguf": {"tile": (128, 64, 32)},
    "bitnet_gguf/tiny-bitnet-b158-tl2.gguf": {"tile": (128, 96, 32)},
}
"""Path -> what its bytes cannot tell."""


@cache
def expected(model: str) -> dict[str, np.ndarray]:
    return arrays(f"models/{model}/expected_logits.npz")


def label(path: Path) -> str:
    """The file's name in expected_logits.npz."""
    suffix = "__silu" if path.parent.name == "tiny-bitnet" else ""
    return path.stem.removeprefix(path.parent.name + "-") + suffix


def exact(path: Path) -> np.ndarray:
    return expected(path.parent.name)[f"hf_dequant__{label(path)}"]


def llamacpp(path: Path) -> np.ndarray:
    return expected(path.parent.name)[f"llamacpp__{label(path).removesuffix('__silu')}__kvf32"]


def distance(found: np.ndarray, target: np.ndarray) -> float:
    """Relative RMS."""
    return float(np.linalg.norm(found - target) / np.linalg.norm(target))


def logits(path: Path, activations: str, **options: Any) -> np.ndarray:
    return pq.load(path, activations=activations, **options).logits(tokens_of(path))


def tokens_of(path: Path) -> np.ndarray:
    name = next((p for p in path.parts if p.startswith("tiny-llama")), "tiny-bitnet").partition(".")[0]
    return expected(name)["tokens"]


@pytest.mark.parametrize("path", sorted(MODELS.glob("*/*.gguf")), ids=lambda p: p.stem)
def test_float_activations_are_exact(path, engine):
    np.testing.assert_allclose(logits(path, "float"), exact(path), rtol=0, atol=1e-4)


@pytest.mark.parametrize("path", QUANTIZED, ids=lambda p: p.stem)
def test_int8_activations_stay_closer_to_the_truth_than_llamacpp(path, engine):
    found = logits(path, "int8")
    assert 0 < distance(found, exact(path)) < distance(llamacpp(path), exact(path))
    assert distance(found, llamacpp(path)) < 0.03


@pytest.mark.parametrize("name", ["tiny-llama-tied", "tiny-llama-untied"])
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_folders_equal_transformers(name, activations, engine):
    found = logits(MODELS / name / "hf", activations)
    np.testing.assert_allclose(found, expected(name)["hf_torch__source_f32"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("path", BITNETS)
def test_bitnet_of_every_container(path, engine):
    target = expected("tiny-bitnet")
    found = logits(VECTORS / path, "float", **BITNETS[path])
    if "_bitlinear" in path:  # its scale is 1 / mean|w| in bf16, the target's mean|w| in bf16
        assert distance(found, target["hf_torch__ternary_floatact__relu2"]) < 0.003
    elif "-tl" in path:  # these files store the scale before rounding to bf16, as ik_llama.cpp did
        assert distance(found, target["ik_llama__b158_f32"]) < 0.001
    else:
        np.testing.assert_allclose(found, target["hf_torch__ternary_floatact__relu2"], rtol=0, atol=1e-4)
    rounded = logits(VECTORS / path, "int8", **BITNETS[path])
    judge = "bitlinear" if "_bitlinear" in path else "autobitlinear"
    assert distance(rounded, target[f"hf_torch__packed_{judge}__w1.58a8"]) < 0.04


def test_the_ternary_layout_matters():
    path = VECTORS / "bitnet_gguf/tiny-bitnet-b158-i2_s-arm_64.gguf"
    assert (
        distance(logits(path, "float", ternary_layout="i2_s.x86"), logits(path, "float", ternary_layout="i2_s.arm"))
        > 0.5
    )


def test_master_weights_are_ternarized_with_a_note():
    model = pq.load(MODELS / "tiny-bitnet/hf")
    assert any("14 BitNet master weights" in note for note in model.checkpoint.notes)
    assert not any("ternary" in note for note in pq.load(MODELS / "tiny-llama-tied/hf").checkpoint.notes)


@pytest.mark.parametrize("path", [QUANTIZED[0], MODELS / "tiny-llama-untied/hf"], ids=lambda p: p.stem)
def test_one_token_at_a_time_in_pieces_and_after_a_rewind(path):
    tokens = tokens_of(path)
    model = pq.load(path, activations="float")
    whole = model.logits(tokens)
    close = {"rtol": 0, "atol": 1e-4}
    one = model.session()
    np.testing.assert_allclose([one.feed(tokens[i : i + 1]) for i in range(len(tokens))], whole, **close)
    pieces = model.session()
    found = np.concatenate([pieces.feed_all(tokens[:5]), pieces.feed_all(tokens[5:6]), pieces.feed_all(tokens[6:])])
    np.testing.assert_allclose(found, whole, **close)
    pieces.feed_all(tokens[:3])
    pieces.rewind(7)
    assert pieces.position == 7
    np.testing.assert_allclose(pieces.feed(tokens[7:9]), whole[8], **close)


@pytest.mark.parametrize(("method", "part"), [("fp8", "weight_scale_inv"), ("fbgemm_fp8", "weight_scale")])
def test_8_bit_floats_with_scales(tmp_path, method, part):
    """Logits equal those of the values in float32. The method in config.json alone is not an error."""
    model = MODELS / "tiny-llama-untied/hf"
    tensors, floats = load_file(model / "model.safetensors"), {}
    for name, w in list(tensors.items()):
        tensors[name] = floats[name] = w.astype(np.float32)
        if "_proj." in name:
            stored, scale = (
                (tensors[name] / 0.01).astype(ml_dtypes.float8_e4m3fn),
                np.full((len(w), 1), 0.01, np.float32),
            )
            tensors |= {name: stored, f"{name.removesuffix('weight')}{part}": scale}
            floats[name] = stored.astype(np.float32) * np.float32(0.01)
    config = json.loads((model / "config.json").read_text())
    said = {"quantization_config": {"quant_method": method}}
    for folder, held, more in (("a", tensors, said), ("b", floats, {})):
        (tmp_path / folder).mkdir()
        save_file(held, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps({**config, **more}))
    a, b = (pq.load(tmp_path / f, activations="float").logits([1, 2, 3]) for f in "ab")
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
