import stat
import subprocess
import sys

import pytest

from format_modules import gguf
from formats.gguf_files import ARCH, file, saved, sound, tensor, text, u32
from golden import VECTORS
from polyquant.errors import InputError, PlanError, UnknownNameError
from polyquant.formats.gguf.header import read_header
from polyquant.storage.source import Source
from polyquant.types import Kind, Meta

MODEL = VECTORS / "models/tiny-llama-untied/tiny-llama-untied-Q4_K_M.gguf"
BIG = VECTORS / "gguf/meta_all_types_v3_be.gguf"
V1 = VECTORS / "gguf/meta_v1_gguf-py-0.2.1.gguf"
V2 = VECTORS / "gguf/meta_v2_gguf-py-0.4.4.gguf"
NESTED = VECTORS / "gguf/meta_all_types_v3_le.gguf"


def data(path):
    """Return every tensor's stored bytes."""
    header = read_header(Source(path))
    raw = path.read_bytes()[header.data :]
    return {t.name: (t.shape, t.type_id, t.offset, raw[t.offset : t.offset + 16]) for t in header.tensors}, raw


def values(path, without=()):
    return {
        k: (m.kind, m.item, gguf.plain(m.value)) for k, m in gguf.open(path).metadata.items_typed() if k not in without
    }


@pytest.mark.parametrize("path", [MODEL, BIG, V2, NESTED], ids=lambda p: p.stem)
@pytest.mark.parametrize("name", ["x", "a much longer name " * 200])
def test_a_copy_with_one_value_changed(tmp_path, path, name):
    copy = tmp_path / "copy.gguf"
    done = gguf.edit(
        path, copy, set={"general.name": Meta(Kind.STRING, name)}, remove=["general.name"] if path is MODEL else []
    )
    assert done.how == "copied" and done.nbytes == copy.stat().st_size
    assert gguf.open(copy).metadata["general.name"] == name
    assert values(copy, ["general.name"]) == values(path, ["general.name"])
    assert data(copy) == data(path)
    assert read_header(Source(copy)).version == 3
    assert read_header(Source(copy)).order == read_header(Source(path)).order
    assert [p.name for p in tmp_path.iterdir()] == ["copy.gguf"]


def test_version_1_becomes_version_3(tmp_path):
    copy = tmp_path / "copy.gguf"
    gguf.edit(V1, copy, set={"t.u8": 7})
    assert gguf.open(copy).metadata["t.u8"] == 7
    assert values(copy, ["t.u8"]) == values(V1, ["t.u8"])
    assert {n: w.parts["blocks"].tobytes() for n, w in gguf.open(copy).items()} == {
        n: w.parts["blocks"].tobytes() for n, w in gguf.open(V1).items()
    }
    assert not [f for f in gguf.check(copy) if f.severity.value == "error"]


def test_same_length_is_one_write_in_place(tmp_path):
    path = saved(tmp_path, sound())
    inode = path.stat().st_ino
    assert gguf.edit(path, set={"general.architecture": "bloom"}).how == "in place"
    assert path.stat().st_ino == inode
    assert path.read_bytes() == sound().replace(b"llama", b"bloom")
    assert gguf.edit(path, set={"general.architecture": "bloom"}).how == "unchanged"


def test_a_different_length_rewrites_the_file(tmp_path):
    path = saved(tmp_path, sound())
    path.chmod(0o640)
    inode, before = path.stat().st_ino, data(path)
    assert gguf.edit(path, set={"general.architecture": "x" * 5000}).how == "rewritten"
    assert path.stat().st_ino != inode
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert data(path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]


def test_a_large_change_of_the_same_length_is_not_written_in_place(tmp_path):
    path = saved(tmp_path, file([ARCH, text("k", "a" * 9000)]))
    assert gguf.edit(path, set={"k": "b" * 9000}).how == "rewritten"
    assert gguf.open(path).metadata["k"] == "b" * 9000


def test_a_link_stays_a_link(tmp_path):
    path = saved(tmp_path, sound())
    link = tmp_path / "link.gguf"
    link.symlink_to(path)
    assert gguf.edit(link, set={"general.architecture": "x" * 500}).path == link
    assert link.is_symlink() and gguf.open(path).metadata["general.architecture"] == "x" * 500


def test_remove_rename_and_add(tmp_path):
    path = saved(tmp_path, file([ARCH, u32("a", 1), u32("b", 2), u32("c", 3)], [tensor("t", (4, 2), 0, 0)], bytes(32)))
    gguf.edit(
        path,
        remove=["a"],
        rename={"b": "z"},
        set={"c": "0x10", "new": Meta(Kind.ARRAY, ["x", "y"], Kind.STRING)},
        rename_tensor={"t": "renamed.weight"},
    )
    opened = gguf.open(path)
    assert {k: gguf.plain(v) for k, v in opened.metadata.items()} == {
        "general.architecture": "llama", "z": 2, "c": 16, "new": ["x", "y"],
    }  # fmt: skip
    assert opened.metadata.typed("c").kind is Kind.UINT32
    assert list(opened) == ["renamed.weight"]


def test_swapping_two_names(tmp_path):
    path = saved(tmp_path, file([ARCH, u32("a", 1), u32("b", 2)]))
    gguf.edit(path, rename={"a": "b", "b": "a"})
    assert dict(gguf.open(path).metadata) == {"general.architecture": "llama", "b": 1, "a": 2}


def test_removing_a_key_in_the_same_edit_changes_its_type(tmp_path):
    path = saved(tmp_path, file([ARCH, u32("a", 1)]))
    gguf.edit(path, remove=["a"], set={"a": Meta(Kind.STRING, "one")})
    assert gguf.open(path).metadata.typed("a") == Meta(Kind.STRING, "one")


def test_unknown_types_are_copied(tmp_path):
    path = saved(tmp_path, file([ARCH], [tensor("a", (7,), 137, 0), tensor("b", (3,), 999, 32)], bytes(range(64))))
    before = data(path)
    gguf.edit(path, set={"general.architecture": "y" * 300})
    assert data(path) == before


REFUSED = {
    "other type": ({"set": {"a": Meta(Kind.STRING, "1")}}, PlanError, "has a different type"),
    "new without type": ({"set": {"new": "1"}}, PlanError, "needs a type"),
    "not a number": ({"set": {"a": "one"}}, PlanError, "does not fit"),
    "out of range": ({"set": {"a": "4294967296"}}, PlanError, "does not fit"),
    "no such key": ({"remove": ["aa"]}, UnknownNameError, "aa"),
    "no such key to rename": ({"rename": {"q": "r"}}, UnknownNameError, "q"),
    "onto another key": ({"rename": {"a": "b"}}, PlanError, "two keys"),
    "no such tensor": ({"rename_tensor": {"x": "y"}}, UnknownNameError, "x"),
    "tensor onto another": ({"rename_tensor": {"t": "s"}}, PlanError, "two tensors"),
    "long tensor name": ({"rename_tensor": {"t": "n" * 64}}, PlanError, "63 bytes"),
    "alignment": ({"set": {"general.alignment": Meta(Kind.UINT32, 64)}}, PlanError, "alignment"),
    "alignment by rename": ({"rename": {"a": "general.alignment"}}, PlanError, "alignment"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_edits_change_nothing(tmp_path, case):
    options, error, message = REFUSED[case]
    raw = file([ARCH, u32("a", 1), u32("b", 2)], [tensor("s", (4, 2), 0, 0), tensor("t", (4, 2), 0, 32)], bytes(64))
    path = saved(tmp_path, raw)
    with pytest.raises(error, match=message):
        gguf.edit(path, **options)
    assert path.read_bytes() == raw and [p.name for p in tmp_path.iterdir()] == ["x.gguf"]


def test_targets_that_exist_are_kept(tmp_path):
    path, other = saved(tmp_path, sound()), saved(tmp_path, b"precious", "y.gguf")
    with pytest.raises(PlanError, match="exists"):
        gguf.edit(path, other)
    with pytest.raises(PlanError, match="inside the source"):
        gguf.edit(path, path, overwrite=True)
    with pytest.raises(PlanError, match="not a model file"):
        gguf.edit(path, other, overwrite=True)
    assert other.read_bytes() == b"precious"
    other.write_bytes(BIG.read_bytes())
    gguf.edit(path, other, overwrite=True)
    assert other.read_bytes() == sound()


@pytest.mark.parametrize("length", [1, 6000], ids=["in place", "rewritten"])
def test_concurrent_edits_are_all_kept(tmp_path, length):
    keys = [f"key{i}" for i in range(8)]
    path = saved(tmp_path, file([ARCH, *(text(key, "-" * length) for key in keys)], [], b""))
    script = (
        "import sys; from polyquant.formats.gguf.edit import edit; edit(sys.argv[1], set={sys.argv[2]: sys.argv[3]})"
    )
    new = {key: f"{i}" * (length if length == 1 else length + i) for i, key in enumerate(keys)}
    running = [subprocess.Popen([sys.executable, "-c", script, path, *item]) for item in new.items()]
    assert [p.wait(60) for p in running] == [0] * len(keys)
    assert {key: gguf.open(path).metadata[key] for key in keys} == new
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]


def test_leftovers_of_a_killed_edit_are_removed_by_the_next(tmp_path):
    path = saved(tmp_path, sound())
    script = """if True:
        import os, sys
        from importlib import import_module
        module = import_module("polyquant.formats.gguf.edit")
        module._copy = lambda *_: os.kill(os.getpid(), 9)
        module.edit(sys.argv[1], set={"general.architecture": "x" * 5000})
    """
    assert subprocess.run([sys.executable, "-c", script, path]).returncode == -9
    assert len(list(tmp_path.iterdir())) == 2 and path.read_bytes() == sound()
    gguf.edit(path, set={"general.architecture": "y" * 5000})
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]


def test_broken_files_are_not_edited(tmp_path):
    path = saved(tmp_path, sound()[:-33])
    with pytest.raises(InputError, match="GGUF020"):
        gguf.edit(path, set={"general.architecture": "x"})


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(PlanError, match="folder does not exist"):
        gguf.edit(saved(tmp_path, sound()), tmp_path / "none" / "x.gguf")
    with pytest.raises(PlanError, match="cannot be written"):
        gguf.edit(saved(tmp_path, sound()), "/proc/x.gguf")


def test_the_missing_last_padding_is_added(tmp_path):
    path, copy = saved(tmp_path, sound()[:-20]), tmp_path / "copy.gguf"
    gguf.edit(path, copy)
    assert list(gguf.check(copy)) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=b", ("a", "b")),
        ("a=", ("a", "")),
        ("a=b=c:u32=d", ("a", "b=c:u32=d")),
        ("a:u32=7", ("a", Meta(Kind.UINT32, 7))),
        ("a:i8=-0x7", ("a", Meta(Kind.INT8, -7))),
        ("a:f32=1e-5", ("a", Meta(Kind.FLOAT32, 1e-5))),
        ("a:bool=True", ("a", Meta(Kind.BOOL, True))),
        ("a:str=x:y=z", ("a", Meta(Kind.STRING, "x:y=z"))),
        ('a:[str]=["x", "y"]', ("a", Meta(Kind.ARRAY, ["x", "y"], Kind.STRING))),
        ("a:[i32]=[]", ("a", Meta(Kind.ARRAY, [], Kind.INT32))),
        ("a:[f64]=[1, 2.5]", ("a", Meta(Kind.ARRAY, [1, 2.5], Kind.FLOAT64))),
    ],
)
def test_settings(text, expected):
    assert gguf.parse_setting(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "=b",
        "a:u32=x",
        "a:u32=1.5",
        "a:bool=maybe",
        "a:[u32]=7",
        "a:[u32]=[1.5]",
        "a:[str]=[1]",
        "a:[bool]=[1]",
        "a:[u8",
    ],
)
def test_invalid_settings(text):
    with pytest.raises(PlanError):
        gguf.parse_setting(text)


def test_an_unknown_type_suggests_similar_ones():
    with pytest.raises(UnknownNameError, match="u32"):
        gguf.parse_setting("a:uint32=7")
