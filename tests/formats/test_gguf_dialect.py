import numpy as np
import pytest

from format_modules import gguf
from formats.gguf_files import ARCH, file, saved, tensor, text, u32
from polyquant import registry
from polyquant.conversion.convert import convert
from polyquant.formats.gguf.dialect import TYPES, WRITTEN_AS

MEANINGS = sorted({(t.codec, t.block, t.nbytes, i) for d in ("mainline",) for i, t in TYPES[d].items()})


@pytest.mark.parametrize(("name", "block", "nbytes", "type_id"), MEANINGS)
def test_table_equals_the_codecs(name, block, nbytes, type_id):
    codec = registry.codec(name)
    assert codec.granule == (1, block)
    assert codec.specs((3, 2 * block))["blocks"].nbytes == 3 * 2 * nbytes
    assert codec.type_id == type_id == WRITTEN_AS[name]


@pytest.mark.parametrize(("name", "tail"), [("i2_s.x86", 32), ("i2_s.arm", 32), ("i2_s.x4", 32), ("trinity.i2_s", 0)])
def test_ternary_sizes_equal_the_codecs(name, tail):
    (spec,) = registry.codec(name).specs((8, 256)).values()
    assert spec.nbytes == 8 * 256 // 4 + tail
    assert WRITTEN_AS[name] == 36


def one_type(folder, type_id, nbytes, *entries, alignment=32):
    """A file of two tensors [128, 256] of one type, each in nbytes."""
    padded = -(-nbytes // alignment) * alignment
    tensors = [tensor("a", (256, 128), type_id, 0), tensor("b", (256, 128), type_id, padded)]
    return saved(folder, file([*entries], tensors, bytes(2 * padded)))


N = 256 * 128


@pytest.mark.parametrize(
    ("type_id", "nbytes", "arch", "expected"),
    [
        (36, N // 4 + 32, "bitnet-b1.58", "bitnet"),
        (36, N // 4 + 32, "llama", "bitnet"),
        (36, N // 4, "llama", "trinity"),
        (36, N // 4, "bitnet", "trinity"),  # the chain goes before the architecture
        (35, N // 256 * 66, "bitnet", "mainline"),
        (35, N // 32 * 10, "llama", "trinity"),
        (34, N // 256 * 54, "llama", "mainline"),
        (34, N // 32 * 8, "llama", "trinity"),
        (38, N // 4 + 32, "bitnet-25", "bitnet"),
        (38, N // 4, "llama", "trinity"),
        (39, N // 4, "llama", "trinity"),
        (39, N // 4, "bitnet-b1.58", "trinity"),
        (39, N // 32 * 17, "llama", "mainline"),
        (39, 11 * 1024, "bitnet-b1.58", "bitnet"),
        (40, N // 64 * 36, "llama", "mainline"),
        (41, N // 128 * 18, "llama", "mainline"),
        (42, N // 64 * 18, "bitnet", "mainline"),
        (137, 4096, "llama", "ik_llama"),
    ],
)
def test_dialect_is_detected(tmp_path, type_id, nbytes, arch, expected):
    opened = gguf.open(one_type(tmp_path, type_id, nbytes, text("general.architecture", arch)))
    assert opened.dialect.name == expected
    assert opened.dialect.why


@pytest.mark.parametrize("type_id", [34, 36, 38, 39])
def test_trinity_types_without_a_scale_are_one_code(tmp_path, type_id):
    """Two bits per weight, low bits first: 00, 01, 10 = 0, +1, -1; written back as type 36."""
    symbols = np.random.default_rng(type_id).integers(0, 3, (128, 256))
    lanes = symbols.reshape(128, 64, 4)
    packed = (lanes << np.array([0, 2, 4, 6])).sum(axis=2).astype(np.uint8)
    tensors = [tensor("blk.0.a.weight", (256, 128), type_id, 0), tensor("blk.0.b.weight", (256, 128), type_id, N // 4)]
    path = saved(tmp_path, file([text("general.architecture", "none")], tensors, packed.tobytes() * 2))
    opened = gguf.open(path)
    assert {w.codec.name for w in opened.values()} == {"trinity.i2_s"} and not opened.notes
    values = np.array([0, 1, -1], np.float32)[symbols]
    np.testing.assert_array_equal(opened["blk.0.b.weight"].dequantize(), values)
    again = tmp_path / "again.gguf"
    report = convert(path, again)
    assert {s.action for s in report.steps} == {"copy"}
    np.testing.assert_array_equal(gguf.open(again)["blk.0.a.weight"].dequantize(), values)


def test_mixture_of_i2_s_and_mxfp4_is_ik_llama(tmp_path):
    tensors = [tensor("a", (256, 128), 36, 0), tensor("b", (256, 128), 39, N // 4 + 32)]
    path = saved(tmp_path, file([ARCH, u32("general.file_type", 40)], tensors, bytes(N // 4 + 32 + N // 32 * 17)))
    opened = gguf.open(path)
    assert opened.dialect.name == "ik_llama"
    assert [w.codec.name for w in opened.values()] == ["i2_s.x86", "mxfp4"]


def test_unknown_types_are_copied(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 96 + 64 + 32, np.uint8)
    tensors = [tensor("a", (7, 5), 137, 0), tensor("b", (8,), 0, 96), tensor("c", (3,), 999, 128)]
    opened = gguf.open(saved(tmp_path, file([ARCH], tensors, data.tobytes())))
    assert [w.codec.name for w in opened.values()] == ["ggml.type_137", "f32", "ggml.type_999"]
    np.testing.assert_array_equal(opened["a"].parts["bytes"], data[:96])
    np.testing.assert_array_equal(opened["c"].read()["bytes"], data[128:])
    assert opened["a"].shape == (5, 7)
    assert any("999" in note for note in opened.notes)
