"""Every codec family passes the public contract (polyquant.testing.codecs), with native kernels and in numpy."""

import re
from dataclasses import replace

import numpy as np
import pytest

import polyquant
from polyquant import registry
from polyquant.codecs.opaque import OpaqueCodec
from polyquant.codecs.opaque_dtype import OpaqueDtype
from polyquant.codecs.undecoded_dtype import UndecodedDtype
from polyquant.errors import UnknownNameError
from polyquant.ops import native
from polyquant.quantizers.affine import input_side
from polyquant.registry import CODECS
from polyquant.testing.codecs import any_parts, check_codec, check_opaque, check_registered, same_floats

K = 1536  # every block, both tiles of TL
INTEGERS = {"i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "bool"}
TERNARY = {n for n in CODECS if n.startswith(("i2_s", "trinity", "tl", "hf_bitnet", "tq"))}
READ_ONLY = {"iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"}
WRITABLE = sorted(set(CODECS) - READ_ONLY)
TILES = {"tl1": (128, 128, 32), "tl2": (128, 96, 32)}
COARSE = {"q1_0": 0.5, "q2_0": 0.6, "q2_k": 0.15, "trellis.2": 0.1}

MSMODELSLIM = {  # name -> error
    "w8a16": 1e-4, "w8a16.g32": 1e-4, "w8a16.asym": 1e-4, "w8a16.g32.asym": 1e-4, "w8a16.tensor": 3e-4,
    "w8a16.f16": 1e-4, "w8a16.flat": 1e-4,
    "w8a16.bf16.flat": 1e-4, "w8a8": 1e-4, "w8a8.tensor": 3e-4, "w8a8.bf16.xf32": 1e-4, "w8a8.i64": 1e-4,
    "w8a8.scales": 1e-4, "w8a8s": 1e-4, "w8a8.mix": 1e-4,
    "w8a8.mix.f16.i64": 1e-4, "w8a8.dynamic": 1e-4, "w4a16": 0.03, "w4a16.pack_k": 0.03, "w4a16.g32.pack_n": 0.02,
    "w4a8.dynamic": 0.03,
    "w4a8.dynamic.sums1": 0.03, "w4a8.dynamic.g32.second.pack_n.sums16": 0.02,
}  # fmt: skip
TRELLIS = {  # name -> error; small windows and grids, because the encoder's reference is slow
    "trellis.3.mul1.8.flat": 0.05, "trellis.3.grid": 0.2, "trellis.4.grid.rotated": 0.2, "trellis.3.mcg.8": 0.05,
    "trellis.2.3inst.6.h128x16": 0.2,
    "trellis.4.mul1.6.exl3.g2": 0.05, "metal_marlin.4": 0.2, "metal_marlin.3.h128": 0.2, "metal_marlin.4.g4": 0.2,
}  # fmt: skip
READERS = [
    "gptq.2.g32", "gptq.3.g32", "gptq.4.g128", "gptq.8", "gptq.4.g32.v2", "gptq.3.v2.f32", "gptq.4.g32.act",
    "gptq.8.g64.bf16",
    "awq.4", "awq.4.g32", "awq.4.g128.bf16", "compressed.i8", "compressed.i8.dynamic", "compressed.i8.tensor.f32",
    "compressed.i8.g32.zp",
    "compressed.p4.g32", "compressed.p4.g32.zpp", "compressed.p4.g32.act", "compressed.p8.zp.f16", "chatglm.4",
    "chatglm.8", "chatglm.4.bf16",
    "bnb.nf4.b64", "bnb.fp4.b128", "bnb.fp4.b64.flat", "bnb.nf4.b64.double", "bnb.int8", "hqq.8.g64.axis1.f32",
    "hqq.4.g64.axis1", "hqq.4.g64.axis0.bf16", "hqq.3.g32.axis0", "hqq.3.g64.axis1.bf16", "hqq.2.g16.axis1",
    "hqq.1.g8.axis0.f32", "modelopt.int4.g32", "modelopt.int4.pre", "modelopt.int4.g32.pre.f16",
    "torchao.int4.g32", "torchao.int4.f32", "torchao.int8.g32.f32", "torchao.int8.sym.f16",
]  # fmt: skip

MLX = {  # name -> error
    "mlx.2.g32": 0.15, "mlx.3.g64": 0.05, "mlx.4.g128.f16": 0.02, "mlx.5.g32.f32": 0.01, "mlx.6.g64": 1e-3,
    "mlx.8.g32": 1e-4, "mlx.mxfp4": 0.02, "mlx.nvfp4": 0.02, "mlx.mxfp8": 2e-3,
}  # fmt: skip


def codec_of(name):
    if name.startswith("trellis"):  # the encoder's reference is slow
        return polyquant.codec(name, window_bits=8)
    return polyquant.codec(name, tile=TILES[name]) if name in TILES else polyquant.codec(name)


def source(name):
    """Return float32 [rows, K] that the codec represents: integers, ternary (scale 1 if not stored), Gaussians."""
    if name.startswith("trellis"):
        return gaussians(16, 128)
    rng, rows = np.random.default_rng(7), 128 if name in TILES else 16
    if name in INTEGERS:
        return rng.integers(0, 2, (rows, K)).astype(np.float32)
    if name in TERNARY:
        scale = 1 if name.startswith("trinity") else 0.5
        return rng.integers(-1, 2, (rows, K)).astype(np.float32) * np.float32(scale)
    return rng.standard_normal((rows, K)).astype(np.float32)


def gaussians(rows, k):
    return np.random.default_rng(8).standard_normal((rows, k)).astype(np.float32)


def slow(name):
    """The numpy encoder of trellis codes takes a second for each width."""
    return [pytest.mark.slow_with_numpy] if name.startswith("trellis") and name != "trellis.3" else []


@pytest.mark.parametrize("name", [pytest.param(n, marks=slow(n)) for n in WRITABLE])
def test_registered_codecs_fulfil_the_contract(name, engine):
    exact = name in TERNARY | INTEGERS | {"f32", "f64"}
    weighted = name not in TERNARY | INTEGERS and not name.startswith(("f", "bf"))
    check_codec(codec_of(name), source(name), error=0 if exact else COARSE.get(name, 0.05), weighted=weighted)
    check_registered(codec_of(name))


@pytest.mark.parametrize("name", sorted(READ_ONLY))
def test_read_only_block_types(name, engine):
    codec = polyquant.codec(name)
    check_codec(codec, parts=any_parts(codec, (8, 512)), shape=(8, 512))
    check_registered(codec)


@pytest.mark.parametrize("name", MSMODELSLIM)
def test_msmodelslim(name, engine):
    codec = polyquant.codec(name)

    def with_inputs(codes):  # of static types the parts hold the grid of the inputs
        return replace(codes, activation=input_side(codec, codes, (-3, 4), None)) if codec.static else codes

    check_codec(codec, gaussians(16, 256), error=MSMODELSLIM[name], finish=with_inputs)
    check_registered(codec)


@pytest.mark.slow_with_numpy
@pytest.mark.parametrize("name", TRELLIS)
def test_dialects_of_trellis(name, engine):
    codec = polyquant.codec(name)
    check_codec(codec, gaussians(16, 128), error=TRELLIS[name], weighted=True)
    check_registered(codec)


@pytest.mark.skipif(native.lib() is None, reason="windows of 16 bits: the numpy encoder would take minutes")
@pytest.mark.parametrize("name", ["exl3.2.mul1", "exl3.3.mcg", "exl3.4.3inst", "trellis.2"])
def test_windows_of_many_bits(name):
    codec = polyquant.codec(name)
    check_codec(codec, gaussians(128, 128), error=0.1)
    check_registered(codec)


@pytest.mark.parametrize("name", MLX)
def test_mlx(name, engine):
    codec = polyquant.codec(name)
    check_codec(codec, gaussians(16, 256), error=MLX[name], weighted=True)
    check_registered(codec)


@pytest.mark.parametrize("name", READERS)
def test_checkpoints_of_other_tools(name, engine):
    codec, shape = polyquant.codec(name), (32, 256)
    parts = any_parts(codec, shape)
    for key in ("g_idx", "weight_g_idx"):
        if key in parts:
            parts[key] = np.random.default_rng(2).integers(0, shape[1] // codec.group, shape[1], np.int32)
    if name.startswith("torchao.int4"):
        for key in ("_weight_qdata", "_weight_zero_point"):
            parts[key] >>= 4
    if name.startswith("fp8"):
        parts["weight"] = gaussians(*shape).astype(parts["weight"].dtype)
    check_codec(codec, parts=parts, shape=shape)
    check_registered(codec)


@pytest.mark.parametrize(
    "codec",
    [
        OpaqueCodec(99, 64),
        OpaqueDtype(type_id=-1, nbytes=64, dtype="F8_E8M0"),
        UndecodedDtype(-1, 64, "a scheme", "I8"),
    ],
    ids=str,
)
def test_opaque_bytes(codec):
    check_opaque(codec, (8, 8))


@pytest.mark.parametrize("name", sorted(set(CODECS) - set(TILES)))
def test_a_codec_without_a_granule_of_rows_takes_vectors(name):
    codec = polyquant.codec(name)
    if codec.granule[0] == 1:
        assert codec.specs((K,)) == codec.specs((1, K)) or name.startswith("trellis")


def test_read_only_types_accept_any_bytes(engine):
    for name in READ_ONLY:
        codec = polyquant.codec(name)
        parts = any_parts(codec, (8, 512), seed=1)
        whole = codec.dequantize(parts, (8, 512))
        same_floats(codec.dequantize(parts, (8, 512), rows=slice(2, 5)), whole[2:5])


def test_an_unknown_name():
    with pytest.raises(polyquant.PolyquantError, match="did you mean q4_k"):
        polyquant.codec("q4k")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("q4k", "q4_k"),
        ("trellis:3", "trellis.3"),
        ("trellis_3_grid", "trellis.3.grid"),
        ("trelis.3", "trellis.3 or trellis.8 or trellis.7"),
        ("W4A16-g128", "w4a16.g128"),
        ("w8a8.dynamics", "w8a8.dynamic or w4a8.dynamic or w4a8.dynamic.g256"),
        ("w8a6", "w8a16 or w8a8 or w8a8s"),
        ("gptq:4", "gptq.4.g128 or gptq.4.g128.v2 or gptq.4.g128.act"),
        ("awq", "awq.4 or awq.4.g64 or awq.4.g128"),
        ("fp8_e4m3", "fp8.e4m3"),
        ("bnb.nf4", "bnb.nf4.b64 or bnb.nf4.b64.double or bnb.int8"),
        ("hqq.4.g64", "hqq.4.g64.axis0 or hqq.4.g64.axis1 or hqq.8.g64.axis1"),
        ("torchao_int4.g32", "torchao.int4.g32"),
        ("exl3.3.mul", "exl3.3.mul1 or exl3.8.mul1 or exl3.7.mul1"),
        ("metalmarlin.4", "metal_marlin.4"),
        ("chatglm4", "chatglm.4"),
        ("i2s", "i2_s.x4 or i2_s.arm or i2_s.x86"),
    ],
)
def test_misspelt_names_suggest_codecs_of_every_family(name, near):
    with pytest.raises(UnknownNameError, match=f"did you mean {re.escape(near)}\\?$"):
        polyquant.codec(name)


def test_a_family_name_lists_its_members():
    with pytest.raises(UnknownNameError, match=r"known: w4a16, w4a16\.g128, w4a8\.dynamic"):
        polyquant.codec("msmodelslim")


def test_names_suggested_by_errors_exist():
    names = registry.known_codecs()
    assert len(names) == len(set(names)) > 120
    for name in names:
        assert polyquant.codec(name).name == name
