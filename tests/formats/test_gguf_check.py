import os
import struct

import pytest

from format_modules import gguf
from formats.gguf_files import ARCH, array, entry, file, saved, sound, string, tensor, text, u32
from golden import VECTORS
from polyquant.errors import InputError
from polyquant.types import Severity

T = tensor("a", (4, 2), 0, 0)
DATA = bytes(32)
NESTED = struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 4, 1) + struct.pack("<I", 7)


def claims(item: int, count: int) -> bytes:
    return entry("k", 9, struct.pack("<IQ", item, count))


def deep(n: int) -> bytes:
    return entry("k", 9, struct.pack("<IQ", 9, 1) * n + struct.pack("<IQ", 4, 0))


ERRORS = {
    "empty file": ("GGUF001", b""),
    "other magic": ("GGUF001", b"PK\x03\x04" + bytes(100)),
    "version 0": ("GGUF002", b"GGUF" + bytes(20)),
    "version 4": ("GGUF002", file([ARCH], version=4)),
    "ends in a key": ("GGUF004", file([ARCH])[:30] + bytes(2)),
    "ends in a shape": ("GGUF003", file([ARCH], [T + T])[: 24 + len(ARCH) + 16]),
    "10^12 keys": ("GGUF004", file([ARCH], n_keys=10**12)),
    "2^64 - 1 keys": ("GGUF004", file([ARCH], n_keys=2**64 - 1)),
    "10^12 tensors": ("GGUF004", file([ARCH], n_tensors=10**12)),
    "10^12 numbers": ("GGUF004", file([claims(4, 10**12)])),
    "2^62 doubles": ("GGUF004", file([claims(12, 2**62)])),
    "10^12 strings": ("GGUF004", file([claims(8, 10**12)])),
    "10^12 arrays": ("GGUF004", file([claims(9, 10**12)])),
    "a long string": ("GGUF004", file([entry("k", 8, struct.pack("<Q", 10**12))])),
    "a string of 2^64 - 1 in an array": ("GGUF004",
        file([entry("k", 9, struct.pack("<IQQ", 8, 1, 2**64 - 1) + bytes(64))])),
    "empty key": ("GGUF005", file([ARCH, u32("", 1)])),
    "key twice": ("GGUF006", file([ARCH, u32("k", 1), u32("k", 2)])),
    "key not UTF-8": ("GGUF007", file([ARCH, entry(b"\xff\xfe", 4, bytes(4))])),
    "name not UTF-8": ("GGUF007", file([ARCH], [tensor(b"\xff", (4, 2), 0, 0)], DATA)),
    "value type 13": ("GGUF008", file([entry("k", 13, bytes(64))])),
    "item type 99": ("GGUF008", file([claims(99, 1)])),
    "five arrays deep": ("GGUF010", file([deep(4)])),
    "1000 arrays deep": ("GGUF010", file([deep(1000)])),
    "many nested arrays": ("GGUF010",
        file([entry("k", 9, struct.pack("<IQ", 9, 17_000) + struct.pack("<IQ", 4, 0) * 17_000)])),
    "alignment 48": ("GGUF011", file([ARCH, u32("general.alignment", 48)])),
    "alignment 0": ("GGUF011", file([ARCH, u32("general.alignment", 0)])),
    "alignment 2^31": ("GGUF011", file([ARCH, u32("general.alignment", 1 << 31)])),
    "alignment of a wrong type": ("GGUF012", file([ARCH, entry("general.alignment", 10, struct.pack("<Q", 64))])),
    "name of 64 bytes": ("GGUF013", file([ARCH], [tensor("n" * 64, (4, 2), 0, 0)], DATA)),
    "name twice": ("GGUF014", file([ARCH], [T, tensor("a", (4, 2), 0, 32)], DATA * 2)),
    "five dimensions": ("GGUF015", file([ARCH], [tensor("a", (1, 1, 1, 1, 8), 0, 0)], DATA)),
    "2^32 dimensions": ("GGUF004", file([ARCH], [string("a") + struct.pack("<I", 0xFFFFFFFF) + bytes(100)], DATA)),
    "elements overflow": ("GGUF016", file([ARCH], [tensor("a", (1 << 40, 1 << 40), 0, 0)], DATA)),
    "elements overflow next to a zero": ("GGUF016", file([ARCH], [tensor("a", (0, 1 << 40, 1 << 40), 0, 0)])),
    "negative dimension": ("GGUF016", file([ARCH], [tensor("a", (2**64 - 1, 1), 0, 0)], DATA)),
    "rows no multiple of the block": ("GGUF017", file([ARCH], [tensor("a", (33, 2), 8, 0)], bytes(96))),
    "gap between tensors": ("GGUF018", file([ARCH], [T, tensor("b", (4, 2), 0, 64)], DATA * 3)),
    "first tensor not at 0": ("GGUF018", file([ARCH], [tensor("a", (4, 2), 0, 32)], DATA * 2)),
    "offset not padded": ("GGUF019", file([ARCH], [tensor("a", (9,), 0, 0), tensor("b", (4,), 0, 36)], DATA * 3)),
    "overlap": ("GGUF019", file([ARCH], [T, tensor("b", (4, 2), 0, 0)], DATA * 2)),
    "data cut": ("GGUF020", sound()[:-33]),
    "offset near 2^64": ("GGUF020", file([ARCH], [T, tensor("b", (4, 2), 0, 2**64 - 32)], DATA * 2)),
    "no data at all": ("GGUF020", file([ARCH], [T])),
    "architecture is a number": ("GGUF027", file([u32("general.architecture", 1)])),
    "scores without tokens": (
        "GGUF028",
        file([ARCH, array("tokenizer.ggml.tokens", 8, ["a", "b"]), array("tokenizer.ggml.scores", 6, [0.5])]),
    ),
}  # fmt: skip
LESSER = {
    "array of arrays": ("GGUF009", file([ARCH, entry("k", 9, NESTED)])),
    "trailing bytes": ("GGUF021", sound() + bytes(100)),
    "last padding missing": ("GGUF022", sound()[:-20]),
    "unknown type": ("GGUF023", file([ARCH], [tensor("a", (4, 2), 500, 0)], DATA)),
    "version 1": ("GGUF024", (VECTORS / "gguf/meta_v1_gguf-py-0.2.1.gguf").read_bytes()),
    "version 2": ("GGUF025", (VECTORS / "gguf/meta_v2_gguf-py-0.4.4.gguf").read_bytes()),
    "big-endian": ("GGUF026", (VECTORS / "gguf/meta_all_types_v3_be.gguf").read_bytes()),
    "no architecture": ("GGUF027", file([u32("k", 1)], [T], DATA)),
    "value not UTF-8": ("GGUF029", file([ARCH, text("k", b"\xff")])),
    "item not UTF-8": ("GGUF029", file([ARCH, array("k", 8, ["a", b"\xff"])])),
    "bool 7": ("GGUF030", file([ARCH, entry("k", 7, b"\x07")])),
    "bool 7 in an array": ("GGUF030", file([ARCH, entry("k", 9, struct.pack("<IQ", 7, 2) + b"\x00\x07")])),
    "dimension 0": ("GGUF031", file([ARCH], [tensor("a", (0, 2), 0, 0)])),
    "token id outside": (
        "GGUF033",
        file([ARCH, array("tokenizer.ggml.tokens", 8, ["a"]), u32("tokenizer.ggml.bos_token_id", 1)]),
    ),
    "I2_S": ("GGUF034", (VECTORS / "bitnet_gguf/tiny-bitnet-b158-i2_s-x86_128.gguf").read_bytes()),
    "empty name": ("GGUF035", file([ARCH], [tensor("", (4, 2), 0, 0)], DATA)),
    "no tensors": ("GGUF036", file([ARCH])),
    "scales that do not fit": (
        "GGUF037", file([ARCH], [tensor("a.weight", (64, 2, 2), 40, 0), tensor("a.scale", (3,), 0, 160)], bytes(192)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_files_rejected_by_llama_cpp_are_errors(tmp_path, case, engine):
    code, raw = ERRORS[case]
    path = saved(tmp_path, raw)
    found = list(gguf.check(path))
    assert code in {f.code for f in found if f.severity is Severity.ERROR}, found
    if code not in ("GGUF027", "GGUF028"):  # a checkpoint that llama.cpp cannot run can still be read
        with pytest.raises(InputError) as e:
            gguf.open(path)
        assert "\n" not in str(e.value) and "x.gguf" in str(e.value)


@pytest.mark.parametrize("case", LESSER)
def test_reader_specific_problems_are_not_errors(tmp_path, case):
    code, raw = LESSER[case]
    path = saved(tmp_path, raw)
    found = list(gguf.check(path))
    assert code in {f.code for f in found}
    assert not [f for f in found if f.severity is Severity.ERROR]
    gguf.open(path)


def test_every_code_is_explained_and_tested():
    tested = {code for code, _ in (*ERRORS.values(), *LESSER.values())} | {"GGUF032"}
    assert tested == set(gguf.CODES)
    assert all(len(explained) > 40 for explained in gguf.CODES.values())


def test_sound_files_have_no_findings(tmp_path):
    assert list(gguf.check(saved(tmp_path, sound()))) == []
    for model in sorted((VECTORS / "models").glob("*/*Q*_*.gguf")):
        if "bigendian" not in model.name:
            assert list(gguf.check(model)) == [], model


@pytest.mark.parametrize("items", [[b"\xc3", b"\xa9"], [b"ok", b"\xff"], [b"a" * 17_000, b"\xed\xa0\x80"]])
def test_partial_characters_are_not_text(tmp_path, items, engine):
    assert "GGUF029" in {f.code for f in gguf.check(saved(tmp_path, file([ARCH, array("k", 8, items)])))}
    many = ["é" * (i % 90) for i in range(100_000)]
    assert gguf.open(saved(tmp_path, file([ARCH, array("k", 8, many)]))).metadata["k"].is_text()
    assert not gguf.open(saved(tmp_path, file([ARCH, array("k", 8, [*many, b"\xc3"])]))).metadata["k"].is_text()


def test_text_that_is_not_utf8_is_an_error_when_decoded(tmp_path):
    metadata = gguf.open(saved(tmp_path, file([ARCH, text("k", b"\xff"), array("a", 8, ["x", b"\xff"])]))).metadata
    with pytest.raises(InputError, match="'k' is not UTF-8"):
        metadata["k"]
    assert metadata["a"][0] == "x"
    with pytest.raises(InputError, match="'a' is not UTF-8"):
        metadata["a"][1]
    with pytest.raises(InputError, match="'a' is not UTF-8"):
        metadata["a"].tolist()


def test_a_million_findings_are_summarized(tmp_path):
    path = saved(tmp_path, file([ARCH] * 5000))
    found = [f for f in gguf.check(path) if f.code == "GGUF006"]
    assert len(found) == 21 and "4979 more" in found[-1].message


def test_names_are_printed_escaped(tmp_path):
    path = saved(tmp_path, file([ARCH], [tensor("\x1b[31mred", (33, 2), 8, 0)], bytes(96)))
    with pytest.raises(InputError) as e:
        gguf.open(path)
    assert "\x1b" not in str(e.value)


def test_non_regular_files_are_refused_without_blocking(tmp_path):
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    link = tmp_path / "link.gguf"
    link.symlink_to(tmp_path / "nowhere")
    for path in (pipe, link, tmp_path, tmp_path / "none.gguf", "a\0b"):
        with pytest.raises(InputError):
            gguf.open(path)
        with pytest.raises(InputError):
            list(gguf.check(path))
    good = tmp_path / "good.gguf"
    good.symlink_to(saved(tmp_path, sound()))
    assert len(gguf.open(good)) == 2
