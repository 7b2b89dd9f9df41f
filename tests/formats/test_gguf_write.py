import gguf as gguf_py
import numpy as np
import pytest

from format_modules import gguf
from formats.gguf_files import GGUF_VECTORS
from golden import VECTORS
from polyquant import registry
from polyquant.errors import InputError, PlanError
from polyquant.types import Kind, Meta, TensorSpec

MODELS = [
    VECTORS / "models/tiny-llama-untied/tiny-llama-untied-Q4_K_M.gguf",
    VECTORS / "models/tiny-llama-untied/tiny-llama-untied-Q8_0.gguf",
    VECTORS / "bitnet_gguf/tiny-bitnet-b158-i2_s-x86_128.gguf",
]
F32, Q8_0 = (registry.codec(n) for n in ("f32", "q8_0"))


def write(folder, layout, payload):
    """Write as an executor does: zero-filled files of the planned size, the pieces, then each part in its slot."""
    for f in layout.files:
        raw = bytearray(f.size)
        for at, piece in f.pieces:
            raw[at : at + len(piece)] = piece
        for (tensor, part), slot in layout.slots.items():
            if slot.file == f.name:
                data = payload[tensor][part].tobytes()
                assert len(data) == slot.spec.nbytes
                assert slot.offset + len(data) <= f.size
                raw[slot.offset : slot.offset + len(data)] = data
        (folder / f.name).write_bytes(raw)
    return folder / layout.files[0].name


def rewrite(folder, path, **options):
    source = gguf.open(path)
    tensors = [TensorSpec(w.name, w.shape, w.codec) for w in source.values()]
    metadata = {k: m for k, m in source.metadata.items_typed() if m.item is not Kind.ARRAY}
    layout = gguf.lay_out(tensors, metadata, **options)
    return source, layout, write(folder, layout, {w.name: w.parts for w in source.values()})


def same(a, b, *, without=()):
    assert list(a) == list(b)
    for name in a:
        assert a[name].shape == b[name].shape and a[name].codec.name == b[name].codec.name
        for part, array in a[name].parts.items():
            np.testing.assert_array_equal(array, b[name].parts[part])
    kept = [(k, m) for k, m in a.metadata.items_typed() if m.item is not Kind.ARRAY and k not in without]
    assert kept == [(k, m) for k, m in b.metadata.items_typed() if k not in without]


@pytest.mark.parametrize("path", [*GGUF_VECTORS, *MODELS], ids=lambda p: p.stem)
def test_write_and_read_round_trip(tmp_path, path, engine):
    source, layout, written = rewrite(tmp_path, path)
    again = gguf.open(written)
    same(source, again, without={"general.alignment"})
    assert written.stat().st_size == layout.nbytes
    assert not [f for f in gguf.check(written) if f.severity.value == "error"]


@pytest.mark.parametrize("path", MODELS[:2], ids=lambda p: p.stem)
def test_rewriting_a_file_of_llama_cpp_gives_equal_bytes(tmp_path, path):
    _, _, written = rewrite(tmp_path, path)
    assert written.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("alignment", [32, 64, 4096])
def test_gguf_py_reads_our_files(tmp_path, alignment):
    source, _, written = rewrite(tmp_path, GGUF_VECTORS[1], alignment=alignment)
    reader = gguf_py.GGUFReader(written)
    assert reader.alignment == alignment
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    expected = {k: gguf.plain(v) for k, v in source.metadata.items() if k in fields and k != "general.alignment"}
    assert {k: v for k, v in fields.items() if k != "general.alignment"} == expected
    assert [t.name for t in reader.tensors] == list(source)
    for t in reader.tensors:
        assert t.data.tobytes() == source[t.name].parts["blocks"].tobytes()
        assert tuple(int(n) for n in t.shape)[::-1] == source[t.name].shape


@pytest.mark.parametrize("alignment", [32, 256])
def test_split_files_open_as_one_from_any_member(tmp_path, alignment):
    source, layout, _ = rewrite(tmp_path, MODELS[0], split_bytes=200_000, name="tiny.gguf", alignment=alignment)
    assert not layout.folder and len(layout.files) > 2
    assert layout.files[0].name == f"tiny-00001-of-{len(layout.files):05}.gguf"
    extra = {"split.no", "split.count", "split.tensors.count", "general.alignment"}
    for f in layout.files:
        same(source, gguf.open(tmp_path / f.name), without=extra)
        assert not [x for x in gguf.check(tmp_path / f.name) if x.severity.value == "error"]
    (tmp_path / layout.files[1].name).unlink()
    with pytest.raises(InputError, match="missing: tiny-00002"):
        gguf.open(tmp_path / layout.files[0].name)
    assert [f.code for f in gguf.check(tmp_path / layout.files[0].name)] == ["GGUF032"]


def test_mismatched_members(tmp_path):
    _, layout, first = rewrite(tmp_path, MODELS[0], split_bytes=200_000)
    second = tmp_path / layout.files[1].name
    renamed = tmp_path / "other.gguf"
    renamed.write_bytes(first.read_bytes())
    with pytest.raises(InputError, match="name has no valid number"):
        gguf.open(renamed)
    second.write_bytes((tmp_path / layout.files[2].name).read_bytes())
    with pytest.raises(InputError, match=r"split\.no"):
        gguf.open(first)
    assert "GGUF032" in {f.code for f in gguf.check(first)}


def test_a_split_below_the_limit_is_one_file():
    layout = gguf.lay_out([TensorSpec("a", (2, 32), Q8_0)], {}, split_bytes=1 << 30)
    assert [f.name for f in layout.files] == ["model.gguf"] and not layout.folder


def test_nothing_is_padded_without_tensors():
    layout = gguf.lay_out([], {"general.architecture": Meta(Kind.STRING, "llama")})
    assert layout.nbytes == 24 + 8 + 20 + 4 + 8 + 5


REFUSED = {
    "five dimensions": ([TensorSpec("a", (1, 1, 1, 1, 32), F32)], {}, "4 dimensions"),
    "long name": ([TensorSpec("a" * 64, (2,), F32)], {}, "63 bytes"),
    "empty name": ([TensorSpec("", (2,), F32)], {}, "63 bytes"),
    "block does not divide": ([TensorSpec("a", (4, 33), Q8_0)], {}, "cannot store"),
    "empty tensor": ([TensorSpec("a", (0, 32), F32)], {}, "is empty"),
    "twice the name": ([TensorSpec("a", (2,), F32)] * 2, {}, "same name"),
    "array of arrays": ([], {"k": Meta(Kind.ARRAY, [[1]], Kind.ARRAY)}, "array of arrays"),
    "out of range": ([], {"k": Meta(Kind.UINT8, 256)}, "does not fit"),
    "not a number": ([], {"k": Meta(Kind.UINT32, "x")}, "does not fit"),
    "out of range in an array": ([], {"k": Meta(Kind.ARRAY, [1, -1], Kind.UINT64)}, "does not fit"),
    "float too large": ([], {"k": Meta(Kind.FLOAT32, 1e300)}, "does not fit"),
    "lone surrogate": ([], {"k": Meta(Kind.STRING, "\ud800")}, "does not fit"),
    "empty key": ([], {"": Meta(Kind.BOOL, True)}, "1 to 65535"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_gguf_content_is_refused(case):
    tensors, metadata, message = REFUSED[case]
    with pytest.raises(PlanError, match=message):
        gguf.lay_out(tensors, metadata)


@pytest.mark.parametrize(
    ("codecs", "message"),
    [
        (["u8"], "no type for u8"),
        (["i2_s.x86", "i2_s.arm"], "same type number"),
        (["i2_s.x86", "mxfp4"], "no program reads"),
    ],
)
def test_mixtures_unreadable_by_any_program_are_refused(codecs, message):
    tensors = [TensorSpec(f"t{i}", (8, 256), registry.codec(c)) for i, c in enumerate(codecs)]
    with pytest.raises(PlanError, match=message):
        gguf.lay_out(tensors, {})


def test_alignment_must_be_a_power_of_two():
    with pytest.raises(PlanError, match="power of two"):
        gguf.lay_out([], {}, alignment=48)
