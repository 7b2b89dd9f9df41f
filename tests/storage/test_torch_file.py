import io
import os
import pickle
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden import VECTORS, arrays
from polyquant.errors import InputError, PolyquantError, UnsupportedError
from polyquant.storage import safetensors
from polyquant.storage.pickle_reader import state_dict
from polyquant.storage.source import FileArray, Source
from polyquant.storage.torch_file import StridedArray, plausible, read_torch
from polyquant.types import ArraySpec, as_matrix

BIN = VECTORS / "hf_bin"


def spec(tensor):
    """[rows, bytes per row]"""
    rows, k = as_matrix(tensor.shape)
    return ArraySpec((rows, k * tensor.itemsize), np.dtype(np.uint8))


# ---------------------------------------------------------------- genuine files


def test_equals_safetensors():
    source, twin = Source(BIN / "pytorch_model.bin"), Source(BIN / "model.safetensors")
    tensors, entries = read_torch(source), safetensors.read_header(twin).entries
    assert set(tensors) == set(entries)
    for name, t in tensors.items():
        e = entries[name]
        assert (t.dtype, t.shape, t.nbytes) == (e.dtype, e.shape, e.nbytes)
        assert t.array(source, spec(t)).view().tobytes() == twin.pread(e.offset, e.nbytes).tobytes()


def test_views_are_gathered():
    expected = arrays("hf_bin/views.npz")
    source = Source(BIN / "views.bin")
    tensors = read_torch(source)
    assert set(tensors) == set(expected)
    kinds = set()
    for name, t in tensors.items():
        array = t.array(source, spec(t))
        kinds.add(type(array))
        assert array.view().tobytes() == expected[name].tobytes(), name
        whole = array.view()
        for rows in (slice(0, 1), slice(1, 3), slice(2, 99), slice(3, 2)):
            np.testing.assert_array_equal(array.read(rows.start, rows.stop), whole[rows])
    assert kinds == {FileArray, StridedArray}


def test_a_view_in_a_different_shape():
    source = Source(BIN / "views.bin")
    t = read_torch(source)["transposed"]
    flat = t.array(source, ArraySpec((t.nbytes,), np.dtype(np.uint8)))
    assert flat.read(5, 9).tobytes() == flat.view().tobytes()[5:9]


def test_opening_reads_no_payload(monkeypatch):
    seen = []
    real = Source.pread
    monkeypatch.setattr(Source, "pread", lambda self, offset, n: seen.append((offset, n)) or real(self, offset, n))
    source = Source(BIN / "pytorch_model.bin")
    tensors = read_torch(source)
    first = min(t.offset for t in tensors.values())
    biggest = max(t.nbytes for t in tensors.values())
    # The end record is sought in the last 64 KB, which holds payload in a file as small as this.
    assert all(n <= 4096 or offset + n == source.size or offset < first for offset, n in seen), biggest


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("old.bin", UnsupportedError, "torch 1.6"),
        ("expanded.bin", InputError, "1000000 elements do not fit in 4 bytes"),
    ],
)
def test_other_genuine_files_are_refused(name, kind, why):
    with pytest.raises(kind, match=why):
        read_torch(Source(BIN / name))


# ---------------------------------------------------------------- hostile pickles


class Attack:
    def __init__(self, callee, *arguments):
        self.what = callee, arguments

    def __reduce__(self):
        return self.what


def torch_pickle(tail=b""):
    """A sound state dict {"a": f32 [2, 3]} with `tail` in front of its STOP."""
    tensor = (
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x06tQ"
        b"K\0K\x02K\x03\x86K\x03K\x01\x86\x89ccollections\nOrderedDict\n)RtR"
    )
    return b"\x80\x02}X\x01\0\0\0a" + tensor + b"s" + tail + b"."


def tensor_with(
    shape=b"K\x02K\x03\x86", stride=b"K\x03K\x01\x86", offset=b"K\0", count=b"K\x06", kind=b"torch\nFloatStorage"
):
    return (
        b"\x80\x02}X\x01\0\0\0actorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagec" + kind + b"\nX\x01\0\0\x000"
        b"X\x03\0\0\0cpu" + count + b"tQ" + offset + shape + stride + b"\x89ccollections\nOrderedDict\n)RtRs."
    )


def hostile(flag):
    """name -> pickle; each would make `flag` appear, or exhaust something, in an unpickler."""
    touch = f"touch {flag}"
    made = {
        f"{name} protocol {p}": pickle.dumps({"a": Attack(*what)}, protocol=p)
        for p in range(6)
        for name, what in {
            "os.system": (os.system, touch),
            "eval": (eval, f"open({str(flag)!r}, 'w')"),
            "exec": (exec, f"open({str(flag)!r}, 'w')"),
            "open": (open, str(flag), "w"),
            "Path.touch": (type(flag).touch, flag),
        }.items()
    }
    i4 = struct.Struct("<i").pack
    return made | {
        "GLOBAL builtins eval": b"\x80\x02cbuiltins\neval\n(X\x03\0\0\x001+1tR.",
        "GLOBAL __builtin__": b"\x80\x02c__builtin__\neval\n.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02ls\x85R.",
        "STACK_GLOBAL of numbers": b"\x80\x04K\x01K\x02\x93.",
        "dotted name": b"\x80\x04\x8c\x0btorch._utils\x8c\x19_rebuild_tensor_v2.__globals__\x93.",
        "torch.load": b"\x80\x02ctorch\nload\n(X\x01\0\0\0xtR.",
        "numpy scalar": b"\x80\x02cnumpy.core.multiarray\nscalar\n.",
        "INST": b"(X\x02\0\0\0lsios\nsystem\n.",
        "OBJ": b"\x80\x02(cos\nsystem\nX\x02\0\0\0lso.",
        "NEWOBJ": b"\x80\x02ccollections\nOrderedDict\n)\x81.",
        "NEWOBJ_EX": b"\x80\x04ccollections\nOrderedDict\n)}\x92.",
        "EXT1": b"\x80\x02\x82\x01.",
        "PERSID": b"Pstorage\n.",
        "BUILD __dict__": b"\x80\x02}}X\x09\0\0\0__class__K\x01sb.",
        "BUILD of state": b"\x80\x02ccollections\nOrderedDict\n}b.",
        "call a string": b"\x80\x02X\x02\0\0\0os)R.",
        "call a storage class": b"\x80\x02ctorch\nFloatStorage\n)R.",
        "OrderedDict of arguments": b"\x80\x02ccollections\nOrderedDict\n]\x85R.",
        "NEXT_BUFFER": b"\x80\x05\x97.",
        "LONG4 huge": b"\x80\x02\x8b" + i4(2**31 - 1) + bytes(100) + b".",
        "LONG4 long": b"\x80\x02\x8b" + i4(1_000_000) + bytes(1_000_000) + b".",
        "LONG4 negative": b"\x80\x02\x8b" + i4(-1) + b".",
        "LONG text": b"I" + b"9" * 100_000 + b"\n.",
        "BINUNICODE huge": b"\x80\x02X\xff\xff\xff\xffabc.",
        "BINUNICODE8 huge": b"\x80\x04\x8d" + b"\xff" * 8 + b"abc.",
        "FRAME huge": b"\x80\x04\x95" + b"\xff" * 8 + b"}.",
        "BINBYTES huge": b"\x80\x03B\xff\xff\xff\xff.",
        "deep lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
        "deep tuples": b"\x80\x02)" + b"\x85" * 1_000_000 + b".",
        "deep marks": b"\x80\x02" + b"(" * 1_000_000 + b".",
        "many opcodes": b"\x80\x02" + b"N0" * 2_000_000 + b"}.",
        "billion laughs": b"\x80\x02)" + b"q\0h\0\x86" * 100_000 + b".",
        "billion laughs as key": b"\x80\x02})" + b"q\0h\0\x86" * 100_000 + b"Ns.",
        "billion laughs as pid": b"\x80\x02)" + b"q\0h\0\x86" * 100_000 + b"Q.",
        "billion laughs as arguments":
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)" + b"q\0h\0\x86" * 100_000 + b"R.",
        "billion laughs as name": b"\x80\x04)" + b"q\0h\0\x86" * 100_000 + b"K\x01\x93.",
        "a dict in itself": b"\x80\x02}q\0X\x01\0\0\0ah\0s.",
        "a list in itself": b"\x80\x02]q\0h\0a.",
        "memo never put": b"\x80\x02h\x07.",
        "memo of nothing": b"\x80\x02q\0.",
        "memo of a mark": b"\x80\x02(q\0.",
        "pop a mark": b"\x80\x02(0.",
        "tuple without mark": b"\x80\x02K\x01t.",
        "empty stack": b"\x80\x02.",
        "more than one value": b"\x80\x02}}.",
        "after STOP": b"\x80\x02}.cos\nsystem\n",
        "no STOP": b"\x80\x02}",
        "two protocols": b"\x80\x02\x80\x02}.",
        "protocol 9": b"\x80\x09}.",
        "key twice": b"\x80\x02}(X\x01\0\0\0aNX\x01\0\0\0aNu.",
        "key without value": b"\x80\x02}(X\x01\0\0\0au.",
        "key is a tuple": b"\x80\x02})Ns.",
        "bad UTF-8": b"\x80\x02X\x01\0\0\0\xff.",
        "append to a dict": b"\x80\x02}Na.",
        "set on a list": b"\x80\x02]X\x01\0\0\0aNs.",
        "list of tensors": b"\x80\x02].",
        "nested checkpoint": b"\x80\x02}X\x05\0\0\0modelX\x01\0\0\0xs.",
        "name without end": b"\x80\x02c" + b"o" * 1000,
        "pid is a string": b"\x80\x02X\x07\0\0\0storageQ.",
        "pid of a module": b"\x80\x02(X\x06\0\0\0moduleNNNNtQ.",
        "storage of a wrong class": tensor_with(kind=b"collections\nOrderedDict"),
        "negative shape": tensor_with(shape=b"J\xff\xff\xff\xffK\x03\x86"),
        "negative stride": tensor_with(stride=b"J\xff\xff\xff\xffK\x03\x86"),
        "bool offset": tensor_with(offset=b"\x88"),
        "shape is a list": tensor_with(shape=b"](K\x02K\x03e"),
        "strides of another rank": tensor_with(stride=b"K\x03\x85"),
        "33 dimensions": tensor_with(shape=b"(" + b"K\x01" * 33 + b"t", stride=b"(" + b"K\x01" * 33 + b"t"),
        "untyped without dtype": tensor_with(kind=b"torch.storage\nUntypedStorage"),
    }  # fmt: skip


FLAG_NAMES = sorted(hostile(Path("flag")))


@pytest.mark.parametrize("name", FLAG_NAMES)
def test_hostile_pickles_are_refused_and_nothing_runs(name, tmp_path):
    flag = tmp_path / "flag"
    data = hostile(flag)[name]
    start = time.process_time()
    with pytest.raises(PolyquantError) as e:
        state_dict(data, "x.bin")
    assert time.process_time() - start < 5
    assert not flag.exists()
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 400


@pytest.mark.parametrize("name", [n for n in FLAG_NAMES if "huge" in n or "LONG" in n or n == "billion laughs as key"])
def test_claimed_sizes_cost_no_memory(name, tmp_path):
    data = hostile(tmp_path)[name]
    tracemalloc.start()
    try:
        with pytest.raises(PolyquantError):
            state_dict(data)
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()


def test_the_attacks_work_on_the_plain_unpickler(tmp_path):
    flag = tmp_path / "flag"
    pickle.loads(hostile(flag)["os.system protocol 2"])
    assert flag.exists()


def test_the_walk_is_bounded(tmp_path):
    with pytest.raises(InputError, match="opcodes"):
        state_dict(hostile(tmp_path)["many opcodes"])


def test_a_large_pickle_is_refused_unread():
    with pytest.raises(InputError, match="too large"):
        state_dict(bytes(16_000_001))


def test_protocols_with_frames(tmp_path):
    for p in (2, 3, 4, 5):
        assert state_dict(pickle.dumps({}, protocol=p)) == {}


@given(
    position=st.integers(0, len(torch_pickle()) - 1),
    byte=st.integers(0, 255),
    cut=st.integers(0, len(torch_pickle())),
    tail=st.binary(max_size=12),
)
@settings(max_examples=300, deadline=None)
def test_mutated_pickles(position, byte, cut, tail):
    data = bytearray(torch_pickle(tail))
    data[position] = byte
    for attempt in (bytes(data), bytes(data[:cut])):
        try:
            state_dict(attempt)
        except PolyquantError as e:
            assert "\n" not in str(e)


# ---------------------------------------------------------------- hostile archives


def archive(pickled=None, entries=None, method=zipfile.ZIP_STORED, prefix="m"):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as z:
        z.writestr(f"{prefix}/data.pkl", torch_pickle() if pickled is None else pickled)
        for name, data in (entries if entries is not None else {"data/0": bytes(range(24))}).items():
            z.writestr(f"{prefix}/{name}", data)
    return buffer.getvalue()


def opened(tmp_path, data):
    path = tmp_path / "x.bin"
    path.write_bytes(data)
    return read_torch(Source(path))


def test_a_valid_archive(tmp_path):
    t = opened(tmp_path, archive())["a"]
    assert (t.dtype, t.shape) == ("F32", (2, 3))
    assert Source(tmp_path / "x.bin").pread(t.offset, 24).tobytes() == bytes(range(24))
    assert plausible(Source(tmp_path / "x.bin"))


def patched(data, at, new):
    return data[:at] + new + data[at + len(new) :]


SOUND = archive()
DIRECTORY = SOUND.index(b"PK\1\2")
END = SOUND.index(b"PK\5\6")
SECOND = SOUND.index(b"PK\1\2", DIRECTORY + 1)
ARCHIVES = {
    "compressed": archive(method=zipfile.ZIP_DEFLATED),
    "encrypted": patched(SOUND, DIRECTORY + 8, b"\1"),
    "no pickle": archive(prefix="a/b"),
    "storage missing": archive(entries={}),
    "storage short": archive(entries={"data/0": bytes(23)}),
    "storage long": archive(entries={"data/0": bytes(25)}),
    "claims 10^12 elements": archive(tensor_with(shape=b"\x8a\x06\x00\x10\xa5\xd4\xe8\x00K\x01\x86")),
    "stores 10^12 elements": archive(tensor_with(count=b"\x8a\x06\x00\x10\xa5\xd4\xe8\x00")),
    "offset outside": archive(tensor_with(offset=b"K\x01")),
    "stride outside": archive(tensor_with(stride=b"K\x04K\x01\x86")),
    "stride vast": archive(tensor_with(stride=b"\x8a\x08" + b"\xff" * 7 + b"\x7fK\x01\x86")),
    "expanded": archive(tensor_with(shape=b"K\x64K\x64\x86", stride=b"K\0K\0\x86")),
    "empty but vast": archive(tensor_with(shape=b"K\0\x8a\x08" + b"\xff" * 7 + b"\x7f\x86")),
    "big-endian": archive(entries={"data/0": bytes(24), "byteorder": b"big"}),
    "byteorder huge": archive(entries={"data/0": bytes(24), "byteorder": bytes(100)}),
    "junk in front": b"PK\3\4" + SOUND,
    "junk behind": SOUND + b"x",
    "many entries": patched(SOUND, END + 10, b"\xfe\xff"),
    "directory moved": patched(SOUND, END + 16, b"\0\0\0\0"),
    "entry outside": patched(SOUND, SECOND + 42, b"\xff\xff\xff\x7f"),
    "entries overlap": patched(SOUND, SECOND + 42, b"\1\0\0\0"),
    "entry twice": patched(SOUND, SECOND + 42, SOUND[DIRECTORY + 42 : DIRECTORY + 46]),
    "two sizes": patched(SOUND, SECOND + 20, b"\1\0\0\0"),
    "zip64 without sizes": patched(SOUND, SECOND + 20, b"\xff" * 8),
    "local header of another": patched(SOUND, SOUND.index(b"m/data/0"), b"m/data/9"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_hostile_archives_are_refused(name, tmp_path):
    with pytest.raises(PolyquantError) as e:
        opened(tmp_path, ARCHIVES[name])
    assert "\n" not in str(e.value)


def test_duplicate_entries(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate"):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as z:
            for _ in range(2):
                z.writestr("m/data.pkl", torch_pickle())
    with pytest.raises(InputError, match="twice"):
        opened(tmp_path, buffer.getvalue())


def test_every_truncation_is_refused(tmp_path):
    for n in range(len(SOUND)):
        with pytest.raises(PolyquantError):
            opened(tmp_path, SOUND[:n])


@given(changes=st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_mutated_archives(changes, tmp_path_factory):
    data = bytearray(SOUND)
    for at, byte in changes:
        data[at] = byte
    path = tmp_path_factory.getbasetemp() / "mutated.bin"
    path.write_bytes(data)
    source = Source(path)
    try:
        tensors = read_torch(source)
        for t in tensors.values():
            t.array(source, spec(t)).view()
    except PolyquantError as e:
        assert "\n" not in str(e)
