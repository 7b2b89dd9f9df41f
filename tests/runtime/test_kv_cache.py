"""KV cache: chunking does not matter, rewinding discards tokens, and memory grows with their number."""

from pathlib import Path

import numpy as np
import pytest

import polyquant
from polyquant.runtime.kv_cache import KVCache
from polyquant.runtime.state import StateSpec

KINDS = ["f32", "f16", "int8"]
LAYERS, HEADS, GROUPS, SIZE = 2, 4, 2, 16
MODELS = Path(polyquant.__file__).parent / "demo"
QUANTIZED = Path(__file__).parent.parent / "vectors/models/tiny-llama-tied/tiny-llama-tied-Q4_0.gguf"


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def text(tokens: int, seed: int = 0) -> list[np.ndarray]:
    return [noise(tokens, n, SIZE, seed=seed + i) for i, n in enumerate((HEADS, GROUPS, GROUPS))]


def feed(cache: KVCache, qkv: list[np.ndarray], *, window: int = 0) -> np.ndarray:
    """All layers see the same tokens -> [layers, T, heads, size]."""
    out = np.stack([cache.attend(i, *(x + i for x in qkv), scale=0.25, window=window) for i in range(LAYERS)])
    cache.length += len(qkv[0])
    return out


def empty(kind: str) -> KVCache:
    return KVCache([StateSpec((GROUPS, SIZE))] * LAYERS, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [0, 45])
@pytest.mark.parametrize("steps", [[1] * 100, [32, 32, 36], [31, 1, 1, 67], [64, 1, 35]], ids=len)
def test_chunk_sizes_do_not_matter(engine, kind, window, steps):
    qkv = text(100)
    at_once = feed(empty(kind), qkv, window=window)
    cache, ends = empty(kind), np.cumsum(steps)
    pieces = [feed(cache, [x[b - n : b] for x in qkv], window=window) for n, b in zip(steps, ends, strict=True)]
    np.testing.assert_allclose(np.concatenate(pieces, 1), at_once, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("back", [0, 32, 64, 65, 70, 99])
def test_rewinding_discards_later_tokens(engine, kind, back):
    qkv, other = text(100), text(60, seed=9)
    cache = empty(kind)
    feed(cache, qkv)
    cache.truncate(back)
    fresh = empty(kind)
    if back:
        feed(fresh, [x[:back] for x in qkv])
    whole = back % 32 == 0 or back > 96  # a full block lost its floats
    atol = 2e-6 if whole or kind != "int8" else 0.02
    np.testing.assert_allclose(feed(cache, other), feed(fresh, other), atol=atol)
    assert cache.length == back + 60


def test_rewinding_into_a_full_int8_block_keeps_its_rounding(engine):
    qkv, other = text(40), text(5, seed=9)
    cache = empty("int8")
    feed(cache, qkv)
    for layer in cache.layers:
        layer.recent[:] = np.nan
    cache.truncate(20)
    assert np.isfinite(feed(cache, other)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_aborted_feed_leaves_no_trace(engine, kind):
    qkv = text(40)
    cache, fresh = empty(kind), empty(kind)
    for c in (cache, fresh):
        feed(c, [x[:32] for x in qkv])
    cache.attend(0, *text(70, seed=5), scale=0.25)  # layer 1 never saw these
    rest = [x[32:] for x in qkv]
    np.testing.assert_allclose(feed(cache, rest), feed(fresh, rest), atol=2e-6)


@pytest.mark.parametrize(("kind", "bytes_a_number"), [("f32", 4), ("f16", 2), ("int8", 1.5)])
def test_capacity_grows_with_the_text(kind, bytes_a_number):
    cache = empty(kind)
    start = cache.nbytes
    assert start <= LAYERS * GROUPS * 2 * 32 * SIZE * 4  # at most one block in float
    for tokens in (1, 31, 500, 1000):
        feed(cache, text(tokens))
        used = cache.length * LAYERS * GROUPS * SIZE * 2
        assert (
            used * bytes_a_number * 0.8
            <= cache.nbytes - start
            <= (used + 32 * LAYERS * GROUPS * SIZE * 2) * bytes_a_number * 1.5
        )
    cache.truncate(-5)
    assert cache.length == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "bitnet"])
def test_a_model_continued_equals_a_model_run_again(engine, name, kind):
    model = polyquant.load(MODELS / name, activations="float", cache=kind)
    tokens = np.random.default_rng(1).integers(0, model.vocab, 70)
    whole = model.session().feed_all(tokens)
    session = model.session()
    pieces = [session.feed_all(tokens[a:b]) for a, b in ((0, 30), (30, 31), (31, 33), (33, 70))]
    # A different order of summation may round a key to a different int8 step.
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=2e-4 if kind == "f32" else 0.05)
    if kind != "f32":
        exact = polyquant.load(MODELS / name, activations="float").logits(tokens)
        assert 0 < np.abs(whole - exact).max() < 0.3


@pytest.mark.parametrize(
    ("path", "activations", "kind"),
    [(QUANTIZED, "float", "f32"), (QUANTIZED, "int8", "f16"), (MODELS / "llama", "int8", "f32")],
    ids=["float activations", "int8 activations", "float weights"],
)
def test_the_default_cache_type_follows_the_activations(path, activations, kind):
    assert polyquant.load(path, activations=activations).decoder.cache_type == kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [[1] * 70, [31, 1, 1, 37], [20, 30, 50]], ids=len)
def test_layers_with_shared_keys_equal_layers_with_copies(engine, kind, steps):
    """Other queries on existing keys leave the cache unchanged, also when a block fills up in between."""
    qkv, others = text(100), noise(100, HEADS, SIZE, seed=7)
    shared, apart = KVCache([StateSpec((GROUPS, SIZE)), StateSpec()], kind), empty(kind)
    assert shared.nbytes == apart.nbytes // 2
    for start, n in zip(np.cumsum([0, *steps[:-1]]), steps, strict=True):
        q, k, v = (x[start : start + n] for x in qkv)
        late = others[start : start + n]
        first = shared.attend(0, q, k, v, scale=0.25)
        second = [shared.again(0, late, k, v, scale=0.25) for _ in range(2)]
        shared.length += n
        wanted = apart.attend(0, q, k, v, scale=0.25), apart.attend(1, late, k, v, scale=0.25)
        apart.length += n
        np.testing.assert_array_equal(first, wanted[0])
        for found in second:
            np.testing.assert_array_equal(found, wanted[1])
