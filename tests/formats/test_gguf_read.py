import json

import numpy as np
import pytest

import polyquant
from format_modules import gguf
from formats.gguf_files import GGUF_VECTORS
from golden import VECTORS, arrays
from polyquant.errors import UnknownNameError, UnsupportedError
from polyquant.types import Kind

PLAIN = {
    "f32": np.float32,
    "f16": np.float16,
    "f64": np.float64,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
}


@pytest.mark.parametrize("path", GGUF_VECTORS, ids=lambda p: p.stem)
def test_metadata_equals_the_reference_json(path, engine):
    expected = json.loads(path.with_suffix(".json").read_text())["kv"]
    if "gguf-py-0" in path.stem:  # these writers omitted empty strings; the JSON lists their input
        assert expected.pop("t.empty")["value"] == "" and b"t.empty" not in path.read_bytes()
    metadata = gguf.open(path).metadata
    assert set(metadata) - {"general.architecture", "general.alignment"} <= set(expected) <= set(metadata)
    for key, want in expected.items():
        typed = metadata.typed(key)
        assert typed.kind.name == want["type"], key
        if "elem_type" in want:
            assert typed.item.name == want["elem_type"], key
        assert gguf.plain(metadata[key]) == want["value"], key


@pytest.mark.parametrize("path", [p for p in GGUF_VECTORS if "no_tensors" not in p.stem], ids=lambda p: p.stem)
def test_tensors_equal_the_written_ones(path):
    weights, expected = gguf.open(path), arrays(f"gguf/{path.stem}.tensors.npz")
    assert set(weights) == set(expected)
    types = json.loads(path.with_suffix(".json").read_text())["tensors"]
    assert list(weights) == list(types)
    for name, want in expected.items():
        w = weights[name]
        assert w.codec.name.upper() == types[name]["type"].upper()
        assert list(w.shape) == types[name]["numpy_shape"]
        raw = w.parts["blocks"]
        assert raw.tobytes() == want.tobytes()
        assert w.read()["blocks"].tobytes() == want.tobytes()
        if w.codec.name in PLAIN:
            np.testing.assert_array_equal(w.dequantize(), want.astype(np.float32))


def test_big_endian_blocks_decode_like_little_endian_ones():
    """The fp16 scales inside the blocks are swapped too: gguf-py decodes these to NaN."""
    weights = gguf.open(VECTORS / "models/tiny-llama-tied/tiny-llama-tied-Q4_K_M-bigendian.gguf")
    source = gguf.open(VECTORS / "models/tiny-llama-tied/tiny-llama-tied-Q4_0.gguf")
    assert {w.codec.name for w in weights.values()} >= {"q4_k", "q6_k", "f32"}
    for name, w in weights.items():
        if w.codec.name == "f32":
            np.testing.assert_array_equal(w.dequantize(), source[name].dequantize())
        else:
            a, b = w.dequantize(), source[name].dequantize()
            assert np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)) < 0.2


@pytest.mark.parametrize(
    ("file", "dialect", "codecs"),
    [
        ("bitnet_gguf/tiny-bitnet-b158-i2_s-x86_128.gguf", "bitnet", {"i2_s.x86", "f32", "f16"}),
        ("bitnet_gguf/tiny-bitnet-b158-i2_s-arm_64.gguf", "bitnet", {"i2_s.x86", "f32", "f16"}),
        ("bitnet_gguf/tiny-bitnet-b158-tl1.gguf", "bitnet", {"tl1", "f32", "f16"}),
        ("bitnet_gguf/tiny-bitnet-b158-tl2.gguf", "bitnet", {"tl2", "f32", "f16"}),
        ("models/tiny-bitnet/tiny-bitnet-TQ1_0.gguf", "mainline", {"tq1_0", "f32", "q4_k", "q6_k", "f16"}),
        ("models/tiny-llama-untied/tiny-llama-untied-Q8_0.gguf", "mainline", {"q8_0", "f32"}),
    ],
)
def test_dialect_and_codecs_of_real_files(file, dialect, codecs):
    opened = gguf.open(VECTORS / file)
    assert opened.dialect.name == dialect
    assert {w.codec.name for w in opened.values()} <= codecs
    assert all(w.dequantize().shape == w.shape for w in opened.values() if w.codec.name in ("f32", "q8_0"))


def test_whole_tensor_types_return_all_bytes():
    i2_s = gguf.open(VECTORS / "bitnet_gguf/tiny-bitnet-b158-i2_s-x86_128.gguf")["blk.0.ffn_down.weight"]
    assert i2_s.parts["blocks"].shape == (256 * 512 // 4 + 32,)
    tl2 = gguf.open(VECTORS / "bitnet_gguf/tiny-bitnet-b158-tl2.gguf")["blk.0.ffn_down.weight"]
    assert tl2.parts["blocks"].shape == (30080,)


def test_the_user_chooses_the_ternary_layout():
    file = VECTORS / "bitnet_gguf/tiny-bitnet-b158-i2_s-arm_64.gguf"
    names = {w.codec.name for w in gguf.open(file, ternary_layout="i2_s.arm").values()}
    assert "i2_s.arm" in names and "i2_s.x86" not in names
    with pytest.raises(UnknownNameError, match=r"i2_s\.arm"):
        gguf.open(file, ternary_layout="arm")
    with pytest.raises(UnknownNameError, match="bitnet"):
        gguf.open(file, dialect="bitnett")


def test_a_dialect_can_be_requested():
    file = VECTORS / "bitnet_gguf/tiny-bitnet-b158-i2_s-x86_128.gguf"
    opened = gguf.open(file, dialect="mainline")
    assert opened.dialect.why == "as requested"
    w = opened["blk.0.ffn_down.weight"]
    assert w.codec.name == "ggml.type_36"
    assert w.parts["bytes"].shape == (32800,)
    with pytest.raises(UnsupportedError, match="36"):
        w.dequantize()


def test_rows_are_read_by_position():
    w = gguf.open(VECTORS / "models/tiny-llama-untied/tiny-llama-untied-Q8_0.gguf")["blk.0.attn_q.weight"]
    whole = w.parts["blocks"]
    part = w.read(slice(3, 7))["blocks"]
    assert part.flags.writeable and not whole.flags.writeable
    np.testing.assert_array_equal(part, whole[3:7])
    np.testing.assert_array_equal(w.dequantize(rows=slice(3, 7)), w.dequantize()[3:7])


def test_strings_decode_lazily(engine):
    metadata = gguf.open(VECTORS / "models/tiny-llama-untied/tiny-llama-untied-Q8_0.gguf").metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == 512
    everything = tokens.tolist()
    assert tokens[7] == everything[7] and tokens[-1] == everything[-1] and tokens[2:5] == everything[2:5]
    assert list(tokens) == everything and tokens == everything
    with pytest.raises(IndexError):
        tokens[512]
    types = metadata["tokenizer.ggml.token_type"]
    assert types.numpy().shape == (512,) and types[0] == types.tolist()[0]
    assert metadata.typed("tokenizer.ggml.tokens").item is Kind.STRING
    with pytest.raises(KeyError):
        metadata["no.such.key"]


def test_sniff_uses_content_not_name(tmp_path):
    assert "version 3" in gguf.sniff(GGUF_VECTORS[0]).why
    assert "big-endian" in gguf.sniff(VECTORS / "gguf/meta_all_types_v3_be.gguf").why
    other = tmp_path / "x.gguf"
    other.write_bytes(b"PK\x03\x04 and more")
    renamed = tmp_path / "weights.bin"
    renamed.write_bytes(GGUF_VECTORS[0].read_bytes())
    assert gguf.sniff(other) is None and gguf.sniff(tmp_path) is None and gguf.sniff(tmp_path / "none") is None
    assert gguf.sniff(renamed).name == "gguf"


def test_registry_knows_the_format():
    form = polyquant.registry.format_named("gguf")
    assert form in polyquant.registry.formats() and form.findings is gguf.CODES
