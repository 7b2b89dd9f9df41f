"""Inputs that are rounded twice: nearly exact, the same in both engines, more accurate latent attention."""

from __future__ import annotations

import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS
from polyquant import registry
from polyquant.ops import native
from polyquant.rows import in_memory
from polyquant.runtime.linear import Linear
from polyquant.runtime.load import load
from polyquant.runtime.split_input import SplitInput
from polyquant.types import Weight


def made(codec: str, rows: int, cols: int, rounding: str = "block") -> Linear:
    found = registry.codec(codec)
    values = np.random.default_rng(cols).standard_normal((rows, cols), np.float32)
    return Linear([Weight("w", (rows, cols), found, in_memory(found.pack(found.quantize(values))))], [None], rounding)


@pytest.mark.parametrize("codec", ["q8_0", "q4_k", "q4_0"])
@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("cols", [512, 768])
def test_splitting_removes_most_of_the_rounding(engine, codec, tokens, cols):
    linear, exact = made(codec, 48, cols), made(codec, 48, cols, "none")
    x = np.random.default_rng(tokens).standard_normal((tokens, cols), np.float32)
    wanted = exact(x)[0]
    once, again = (
        np.abs(y - wanted).max() / np.abs(wanted).max() for y in (linear(x)[0], SplitInput(linear)(linear, x)[0])
    )
    assert once > 1e-3 and again < once / 50


@pytest.mark.parametrize("cols", [32, 96, 2080])
def test_any_number_of_blocks(engine, cols):
    linear = made("q8_0", 5, cols)
    x = np.random.default_rng(1).standard_normal((3, cols), np.float32)
    np.testing.assert_allclose(SplitInput(linear)(linear, x)[0], made("q8_0", 5, cols, "none")(x)[0], rtol=0, atol=2e-3)


def test_only_block_rounding_is_split():
    for linear in (made("q8_0", 4, 64, "none"), made("q8_0", 4, 64, "token"), made("bf16", 4, 64), made("f32", 4, 40)):
        x = np.random.default_rng(2).standard_normal((2, linear.weights[0].shape[1]), np.float32)
        np.testing.assert_array_equal(SplitInput(linear)(linear, x)[0], linear(x)[0])


def test_split_inputs_are_recorded_on_a_tape():
    if native.lib() is None:
        pytest.skip("native kernels are not built or switched off")
    linear = made("q8_0", 16, 256)
    tape = native.module().Tape()
    first, second = np.random.default_rng(4).standard_normal((2, 1, 256), np.float32)
    with tape:
        x = native.empty(1, 256)
        x[:] = first
        (y,) = SplitInput(linear)(linear, x)
    assert tape.complete
    x[:] = second
    tape.run(0)
    np.testing.assert_array_equal(y, SplitInput(linear)(linear, second)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_is_closer_to_exact(name, tmp_path):
    """Mean over many prompts: for a single prompt, one rounding that changes an expert dominates."""
    pq.convert(VECTORS / "architectures" / name, tmp_path / "q8.gguf", to="gguf", codec="q8_0", requantize=True)
    exact, model, plain = (
        load(tmp_path / "q8.gguf", activations="float"),
        load(tmp_path / "q8.gguf"),
        load(tmp_path / "q8.gguf"),
    )
    for layer in plain.decoder.layers:
        assert layer.attention.split_input.enabled
        layer.attention.split_input.enabled = False
        layer.attention.k_b.rounding = layer.attention.v_b.rounding = "block"
    rng, errors = np.random.default_rng(6), {"model": [], "plain": []}
    for _ in range(40):
        tokens = rng.integers(3, exact.vocab - 1, 24).tolist()
        wanted = exact.logits(tokens)
        for key, found in (("model", model), ("plain", plain)):
            errors[key].append(np.sqrt(np.mean((found.logits(tokens) - wanted) ** 2) / np.mean(wanted**2)))
    assert np.mean(errors["model"]) < 0.8 * np.mean(errors["plain"])
