"""Equal content has one digest in every container and layout; every flipped bit of a payload is found and named."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess

import ml_dtypes
import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS
from packers import awq, compressed, gptq, some_codes
from polyquant.analysis.integrity import content, hashing
from polyquant.analysis.integrity.content import digest_of
from polyquant.analysis.integrity.files import FileDigest, read_list, sha256_list
from polyquant.errors import InputError, PlanError
from polyquant.rows import in_memory
from polyquant.types import Affine, Floats, Ternary, Weight


def digest(codec, shape, parts):
    if isinstance(codec, str):
        codec = pq.codec(codec)
    return digest_of(Weight("w", shape, codec, in_memory(parts)), "", lambda _: None)


def contents(path, **options):
    return {name: t.content for name, t in pq.checksum(path, **options).tensors.items()}


def found(path, **options):
    return {(f.code, f.file, f.tensor) for f in pq.validate(path, **options) if f.code.startswith("SUM")}


# ---------------------------------------------------------------- the same content


def arrays(dtype):
    rng = np.random.default_rng(7)
    shapes = {"a.weight": (6, 64), "b.weight": (2, 4, 32), "c.bias": (5,)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16])
def test_floats_are_equal_in_every_container(tmp_path, dtype):
    pq.save(arrays(dtype), tmp_path / "m.gguf")
    pq.save(arrays(dtype), tmp_path / "m.safetensors")
    pq.save(arrays(dtype), tmp_path / "hf", shard_bytes=500)
    pq.save(arrays(dtype), tmp_path / "split.gguf", shard_bytes=700)
    assert len(list(tmp_path.glob("split-*"))) > 1
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    split = next(tmp_path.glob("split-00001*"))
    sums = [pq.checksum(p) for p in (tmp_path / "m.gguf", tmp_path / "m.safetensors", tmp_path / "hf", split)]
    assert len({s.content for s in sums}) == len({s.named for s in sums}) == 1
    assert len(sums[0].tensors) == 3


def test_definition_of_a_float_tensor(tmp_path):
    values = arrays("float32")["a.weight"]
    raw = hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()
    text = json.dumps(["polyquant content 1", "floats", "f32", [6, 64], {"blocks": raw}], separators=(",", ":"))
    pq.save({"a": values}, tmp_path / "m.gguf")
    sums = pq.checksum(tmp_path / "m.gguf")
    assert sums.tensors["a"].content == hashlib.sha256(text.encode()).hexdigest()
    assert sums.content == hashlib.sha256(f"{sums.tensors['a'].content}\n".encode()).hexdigest()
    assert sums.files["m.gguf"].sha256 == hashlib.sha256((tmp_path / "m.gguf").read_bytes()).hexdigest()


def test_pickles_and_safetensors_are_equal(tmp_path):
    folder = VECTORS / "hf_bin"
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).mkdir()
        for file in (name, "config.json"):
            shutil.copy(folder / file, tmp_path / name)
    assert contents(tmp_path / "model.safetensors") == contents(tmp_path / "pytorch_model.bin") != {}


def test_views_in_pickles_are_equal_to_their_copies(tmp_path):
    (tmp_path / "hf").mkdir()
    shutil.copy(VECTORS / "hf_bin/views.bin", tmp_path / "hf/pytorch_model.bin")
    weights = {n: w for n, w in pq.open(tmp_path / "hf").items() if w.shape}
    pq.save(weights, tmp_path / "copy.safetensors")
    views = contents(tmp_path / "hf")
    assert contents(tmp_path / "copy.safetensors") == {n: views[n] for n in weights}


def test_byte_orders_are_equal(tmp_path):
    little, big = (VECTORS / f"gguf/meta_all_types_v3_{end}.gguf" for end in ("le", "be"))
    one, two = contents(little), contents(big)
    assert len(two) > 10
    assert two == {name: one[name] for name in two}
    big = VECTORS / "models/tiny-llama-tied/tiny-llama-tied-Q4_K_M-bigendian.gguf"
    pq.save(dict(pq.open(big)), tmp_path / "little.gguf")
    assert contents(tmp_path / "little.gguf") == contents(big)


@pytest.mark.parametrize("other", ["float16", ml_dtypes.bfloat16])
def test_dtypes_and_shapes_differ(tmp_path, other):
    values = np.ones((4, 32))
    one = digest("f32", (4, 32), pq.codec("f32").pack(Floats(values.astype("f4"))))
    name = "f16" if other == "float16" else "bf16"
    assert digest(name, (4, 32), pq.codec(name).pack(Floats(values.astype(other)))).content != one.content
    assert (
        digest("f32", (8, 16), pq.codec("f32").pack(Floats(values.astype("f4").reshape(8, 16)))).content != one.content
    )


TERNARY = {
    "i2_s.x86": {}, "i2_s.arm": {}, "i2_s.x4": {}, "tl1": {"tile": (128, 64, 32)}, "tl2": {"tile": (128, 96, 32)},
    "tq1_0": {}, "tq2_0": {}, "trinity.tq2_0": {}, "hf_bitnet.autobitlinear": {}, "hf_bitnet.bitlinear": {},
}  # fmt: skip


def ternary(codes, scale, name):
    codec = pq.codec(name, **TERNARY[name])
    return codec, codec.pack(Ternary(codes, np.asarray(scale, np.float32)))


def some_ternary(k=256):
    codes = np.random.default_rng(3).integers(-1, 2, (256, k)).astype(np.int8)
    codes[0, :70] = 0  # the first block of 32 has no scale
    codes[5] = 0
    return codes


@pytest.mark.parametrize("name", TERNARY)
def test_ternary_codes_are_equal_in_every_layout(name):
    k = 352 if name == "tl2" else 512
    codes = some_ternary(k)
    reference = digest(*_sized(ternary(codes, [0.25], "i2_s.x86" if k == 512 else "hf_bitnet.autobitlinear"), codes))
    same = digest(*_sized(ternary(codes, [0.25], name), codes))
    assert same.form == "ternary"
    assert same.content == reference.content
    assert digest(*_sized(ternary(codes, [0.5], name), codes)).content != reference.content
    codes[9, 200] = -codes[9, 200] or 1
    assert digest(*_sized(ternary(codes, [0.25], name), codes)).content != reference.content


def _sized(pair, codes):
    return pair[0], codes.shape, pair[1]


def test_scales_per_block_are_one_content():
    codes = some_ternary(512)
    scale = np.random.default_rng(4).choice([0.25, 0.5], (256, 2)).astype(np.float32)
    a, b = (digest(*_sized(ternary(codes, scale, n), codes)) for n in ("tq2_0", "trinity.tq2_0"))
    assert a.content == b.content != digest(*_sized(ternary(codes, scale[::-1], "tq2_0"), codes)).content


@pytest.mark.parametrize("step", [256, 1 << 12, 1 << 20])
def test_size_of_a_step_does_not_matter(monkeypatch, step):
    codes = some_ternary(256)
    scale = np.random.default_rng(5).choice([0.25, 0.5], (256, 1)).astype(np.float32)
    whole = digest(*_sized(ternary(codes, scale, "tq2_0"), codes))
    floats = arrays("float32")["a.weight"]
    plain = digest("f32", (6, 64), pq.codec("f32").pack(Floats(floats)))
    monkeypatch.setattr(content, "_STEP", step)
    monkeypatch.setattr(content, "PIECE", step)
    assert digest(*_sized(ternary(codes, scale, "tq2_0"), codes)) == whole
    assert digest("f32", (6, 64), pq.codec("f32").pack(Floats(floats))) == plain


def test_mxfp4_is_equal_in_both_orders():
    w = np.random.default_rng(6).standard_normal((4, 64)).astype(np.float32)
    blocks = pq.codec("mxfp4").quantize(w)
    one, two = (digest(name, (4, 64), pq.codec(name).pack(blocks)) for name in ("mxfp4", "hf_mxfp4"))
    assert one.content == two.content
    assert one.stored != two.stored


def test_affine_codes_are_equal_in_every_container():
    n, k, bits = 16, 256, 4
    codes, zeros, scales = some_codes(2, n, k, 2, bits)
    zeros = np.maximum(zeros, 1)
    signed, offset = codes.astype(np.int8) - 8, (zeros - 8).astype(np.float32)
    w4 = pq.codec("w4a16.g128")
    one = [
        digest("gptq.4.g128", (n, k), gptq(codes, zeros, scales, bits)),
        digest("gptq.4.g128.v2", (n, k), gptq(codes, zeros, scales, bits, v2=True)),
        digest("gptq.4.g128.act", (n, k), gptq(codes, zeros, scales, bits, g_idx=np.arange(k) // 128)),
        digest("awq.4.g128", (n, k), awq(codes, zeros, scales)),
        digest("compressed.p4.g128.zpp.f32", (n, k), compressed(signed, scales, bits, offset)),
        digest(w4, (n, k), w4.pack(Affine(4, signed, scales, offset))),
        digest("w4a16.g64", (n, k), pq.codec("w4a16.g64").pack(Affine(4, signed, scales, offset))),
        digest("w4a16.g128.pack_k", (n, k), pq.codec("w4a16.g128.pack_k").pack(Affine(4, signed, scales, offset))),
    ]
    assert {d.form for d in one} == {"affine"}
    assert len({d.content for d in one}) == 1
    other = w4.pack(Affine(4, signed, scales, offset + 1))
    assert digest(w4, (n, k), other).content != one[0].content


def test_trellis_codes_are_equal_in_every_container():
    rng = np.random.default_rng(8)
    shape = (128, 128)
    exl3 = pq.codec("exl3.2.mul1")
    parts = {
        "trellis": rng.integers(-(2**15), 2**15, (8, 8, 32)).astype(np.int16),
        "suh": rng.standard_normal(128).astype(np.float16),
        "svh": rng.standard_normal(128).astype(np.float16),
        "mul1": np.array([0x83DCD12D], np.uint32).view(np.int32),
    }
    codes = exl3.unpack(parts, shape)
    trellis = exl3.trellis(shape)
    assert digest(exl3, shape, parts).content == digest(trellis, shape, trellis.pack(codes)).content
    marlin = pq.codec("metal_marlin.3")
    codes = marlin.quantize(rng.standard_normal((64, 128)).astype(np.float32))
    grid = marlin.trellis((64, 128))
    one, two = digest(marlin, (64, 128), marlin.pack(codes)), digest(grid, (64, 128), grid.pack(codes))
    assert one.content == two.content
    assert one.form == "trellis"


# ---------------------------------------------------------------- damage


def payloads():
    codes = some_ternary(256)
    w = np.random.default_rng(9).standard_normal((128, 128)).astype(np.float32)
    out = {name: (*ternary(codes[:32], [0.25], name), (32, 256)) for name in ("i2_s.x86", "tq2_0", "tq1_0")}
    for name in ("f32", "q4_0", "q4_k", "hf_mxfp4", "w8a16.asym", "trellis.2.grid"):
        codec, rows = pq.codec(name), 4 if name != "trellis.2.grid" else 32
        values = w.reshape(-1, 256)[:rows] if name == "q4_k" else w[:rows]
        out[name] = (codec, codec.pack(codec.quantize(values)), values.shape)
    return out


@pytest.mark.parametrize("name", payloads())
def test_every_bit_of_every_part_counts(name):
    codec, parts, shape = payloads()[name]
    before = digest(codec, shape, parts)
    rng = np.random.default_rng(10)
    for part, array in parts.items():
        raw = np.frombuffer(array.tobytes(), np.uint8)
        bits = np.arange(8 * raw.size) if raw.size < 64 else rng.choice(8 * raw.size, 200, replace=False)
        for bit in bits:
            bad = raw.copy()
            bad[bit // 8] ^= np.uint8(1 << bit % 8)
            after = digest(codec, shape, {**parts, part: bad.view(array.dtype).reshape(array.shape)})
            assert after.stored != before.stored, (part, bit)


def flipped(path, offset, bit=0):
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1 << bit
    path.write_bytes(raw)


def model(tmp_path, **options):
    pq.save(arrays("float32"), tmp_path / "m.gguf", metadata={"general.name": "unchanged"}, **options)
    pq.checksum(tmp_path / "m.gguf").write()
    return tmp_path / "m.gguf"


@pytest.mark.parametrize("tensor", ["a.weight", "b.weight", "c.bias"])
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_a_flipped_bit_is_named(tmp_path, tensor, place):
    path = model(tmp_path)
    assert found(path) == set()
    array = pq.open(path)[tensor].arrays["blocks"]
    flipped(path, array.offset + int((array.spec.nbytes - 1) * place))
    assert found(path) == {("SUM001", "m.gguf", tensor), ("SUM004", "m.gguf", None)}
    flipped(path, array.offset + int((array.spec.nbytes - 1) * place))
    assert found(path) == set()


def test_a_damaged_shard_is_named(tmp_path):
    pq.save(arrays("float32"), tmp_path / "hf", shard_bytes=500, metadata={"model_type": "x"})
    pq.checksum(tmp_path / "hf").write()
    weight = pq.open(tmp_path / "hf")["b.weight"]
    shard = weight.arrays["blocks"].source.path
    flipped(shard, weight.arrays["blocks"].offset + 9)
    (tmp_path / "hf/config.json").write_bytes(b'{"model_type": "y"}')
    assert found(tmp_path / "hf") == {
        ("SUM001", shard.name, "b.weight"),
        ("SUM004", shard.name, None),
        ("SUM004", "config.json", None),
    }
    (tmp_path / "hf/config.json").unlink()
    assert ("SUM006", "config.json", None) in found(tmp_path / "hf")


def test_changed_metadata_is_distinguished_from_changed_tensors(tmp_path):
    path = model(tmp_path)
    flipped(path, path.read_bytes().index(b"unchanged"))
    findings = [f for f in pq.validate(path) if f.code.startswith("SUM")]
    assert [(f.code, f.tensor) for f in findings] == [("SUM005", None)]
    assert "all 3 tensors are equal" in findings[0].message


def test_unused_bits_are_distinguished_from_weights(tmp_path):
    codec, parts = ternary(some_ternary(256)[:32], [0.25], "i2_s.x86")
    weight = Weight("t", (32, 256), codec, in_memory(parts))
    pq.save({"t": weight}, tmp_path / "m.gguf")
    pq.checksum(tmp_path / "m.gguf").write()
    array = pq.open(tmp_path / "m.gguf")["t"].arrays["blocks"]
    flipped(tmp_path / "m.gguf", array.offset + array.spec.nbytes - 3)
    assert {("SUM008", "m.gguf", "t"), ("SUM004", "m.gguf", None)} <= found(tmp_path / "m.gguf")


def test_exchanged_missing_and_added_tensors(tmp_path):
    values = arrays("float32")
    rng = np.random.default_rng(1)
    values["d.weight"] = rng.standard_normal((6, 64), np.float32)
    pq.save(values, tmp_path / "m.gguf")
    pq.checksum(tmp_path / "m.gguf").write(tmp_path / "sums.json")
    values["a.weight"], values["d.weight"] = values["d.weight"], values["a.weight"]
    values["e.weight"] = values.pop("b.weight")
    values["f.weight"] = np.zeros((2, 32), np.float32)
    del values["c.bias"]
    pq.save(values, tmp_path / "m.gguf", overwrite=True)
    findings = {f.tensor: f for f in pq.validate(tmp_path / "m.gguf", checksums=tmp_path / "sums.json")}
    codes = {"a.weight": "SUM001", "d.weight": "SUM001", "e.weight": "SUM009", "f.weight": "SUM003", "c.bias": "SUM002"}
    assert {name: findings[name].code for name in codes} == codes
    assert "the content of d.weight" in findings["a.weight"].message
    assert "b.weight" in findings["e.weight"].message


def test_another_container_is_checked_by_its_tensors(tmp_path):
    sums = pq.checksum(model(tmp_path)).write(tmp_path / "sums.json")
    pq.save(arrays("float32"), tmp_path / "n.safetensors")
    assert found(tmp_path / "n.safetensors", checksums=sums) == {("SUM010", None, None)}


def test_a_file_that_no_longer_opens_is_checked(tmp_path):
    path = model(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    assert ("SUM004", "m.gguf", None) in found(path)


# ---------------------------------------------------------------- the file of checksums


def test_written_and_read(tmp_path):
    sums = pq.checksum(model(tmp_path))
    target = tmp_path / "m.gguf.checksums.json"
    again = pq.Checksums.read(target)
    assert again.tensors == sums.tensors
    assert again.files == sums.files
    with pytest.raises(PlanError, match="target exists"):
        sums.write()
    assert sums.write(overwrite=True) == target
    with pytest.raises(PlanError, match="not a file of checksums"):
        sums.write(tmp_path / "m.gguf", overwrite=True)
    assert len(repr(sums)) < 200
    assert "a.weight" in sums._repr_html_()


def test_an_overwritten_folder_loses_its_checksums(tmp_path):
    for seed in range(2):
        values = {"a": np.random.default_rng(seed).standard_normal((4, 32), np.float32)}
        pq.save(values, tmp_path / "hf", overwrite=True)
        assert found(tmp_path / "hf") == set()
        pq.checksum(tmp_path / "hf").write()
        assert (tmp_path / "hf/polyquant-checksums.json").exists()


def changed(sums, *keys, value):
    data = json.loads(sums.read_text())
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    sums.write_text(json.dumps(data))


BAD = [
    (("tensors", "a.weight", "content"), "0" * 64),
    (("tensors", "a.weight", "stored"), "0" * 63),
    (("tensors", "a.weight"), []),
    (("tensors", "a.weight", "shape"), [-1]),
    (("tensors", "x\n"), None),
    (("tensors",), {}),
    (("files", "m.gguf"), {"size": 1.5, "sha256": "0" * 64}),
    (("files",), None),
    (("checksums",), 2),
    (("checksums",), True),
    (("content",), "0" * 64),
    (("named",), None),
]


@pytest.mark.parametrize(("keys", "value"), BAD)
def test_changed_checksums_are_one_finding(tmp_path, keys, value):
    path = model(tmp_path)
    changed(tmp_path / "m.gguf.checksums.json", *keys, value=value)
    assert found(path) == {("SUM007", "m.gguf.checksums.json", None)}
    with pytest.raises(InputError) as problem:
        pq.Checksums.read(tmp_path / "m.gguf.checksums.json")
    assert "\n" not in str(problem.value)


def test_checksums_with_too_many_values_are_refused(tmp_path):
    path = model(tmp_path)
    (tmp_path / "m.gguf.checksums.json").write_text('{"checksums":1,"x":[' + "[]," * 500_000 + "0]}")
    assert [f.message for f in pq.validate(path) if f.code == "SUM007"] == [
        "JSON has too many values (expected at most 800000)"
    ]


@pytest.mark.parametrize("text", [b"", b"{", b'{"checksums": 1' + b"0" * 50 + b"}", b"[" * 5000, b"\xff\xfe", b"null"])
def test_hostile_checksums_are_one_line(tmp_path, text):
    path = model(tmp_path)
    (tmp_path / "m.gguf.checksums.json").write_bytes(text)
    assert found(path) == {("SUM007", "m.gguf.checksums.json", None)}


# ---------------------------------------------------------------- SHA-256 lists


def test_lists_are_those_of_sha256sum(tmp_path):
    names = ["plain", "two words", "back\\slash", "line\nend"]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    digests = {n: FileDigest(len(n), hashlib.sha256(n.encode()).hexdigest()) for n in names}
    text = sha256_list(digests)
    (tmp_path / "SHA256SUMS").write_text(text)
    done = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read_list(tmp_path / "SHA256SUMS") == {n: d.sha256 for n, d in digests.items()}


@pytest.mark.parametrize("name", ["SHA256SUMS", "sha256sums.txt", "m.gguf.sha256"])
@pytest.mark.parametrize(
    "line", ["{0}  m.gguf\n", "{0} *./m.gguf\n", "SHA256 (m.gguf) = {0}\n", "# hi\n\n{0}  m.gguf\n"]
)
def test_lists_next_to_a_model_are_checked(tmp_path, name, line):
    pq.save(arrays("float32"), tmp_path / "m.gguf")
    good = pq.checksum(tmp_path / "m.gguf").files["m.gguf"].sha256
    (tmp_path / name).write_text(line.format(good) + f"{'0' * 64}  another-file\n")
    assert found(tmp_path / "m.gguf") == set()
    (tmp_path / name).write_text(line.format("0" * 64))
    assert found(tmp_path / "m.gguf") == {("SUM004", "m.gguf", None)}


def test_a_bare_digest_belongs_to_its_file(tmp_path):
    pq.save(arrays("float32"), tmp_path / "m.gguf")
    (tmp_path / "m.gguf.sha256").write_text("0" * 64)
    assert found(tmp_path / "m.gguf") == {("SUM004", "m.gguf", None)}


def test_lists_do_not_leave_the_folder(tmp_path):
    (tmp_path / "secret").write_bytes(b"x")
    pq.save(arrays("float32"), tmp_path / "hf")
    digest_of_secret = hashlib.sha256(b"x").hexdigest()
    names = ["../secret", str(tmp_path / "secret"), "a/../../secret", "link"]
    (tmp_path / "hf/link").symlink_to(tmp_path / "secret")
    (tmp_path / "hf/SHA256SUMS").write_text("".join(f"{digest_of_secret}  {n}\n" for n in names))
    assert found(tmp_path / "hf") == {("SUM006", n, None) for n in names}


@pytest.mark.parametrize(
    "text", [b"hello\n", b"\xff" * 80, b"0" * (5 << 20), b"0" * 64 + b"  a\n" + b"1" * 64 + b"  a\n"]
)
def test_lists_that_cannot_be_read_are_one_finding(tmp_path, text):
    pq.save(arrays("float32"), tmp_path / "m.gguf")
    (tmp_path / "SHA256SUMS").write_bytes(text)
    assert found(tmp_path / "m.gguf") == {("SUM007", "SHA256SUMS", None)}


def test_an_error_stops_all_threads(tmp_path):
    path = model(tmp_path)
    checkpoint = pq.open(path)
    weights = list(checkpoint.values())
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(InputError, match="too short"):
        hashing.hash_all({}, weights, threads=2)
