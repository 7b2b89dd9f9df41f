"""SGLang on NVIDIA GPUs: where it differs from vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polyquant.analysis.consumers.compressed import Group, groups
from polyquant.analysis.consumers.model import FUSED, Model, integer
from polyquant.analysis.consumers.parallel import indivisible
from polyquant.analysis.consumers.record import Consumer, Program, rules_of, words
from polyquant.analysis.consumers.servers import (
    MARLIN_GROUPS,
    block_parts,
    dense_mxfp4,
    fp8_settings,
    gptq_settings,
    missing,
)
from polyquant.types import Finding

__all__ = ["CONSUMER"]

SGLANG = Program("SGLang", "0.5.23", "sgl-project/sglang")
_Q = "sglang/srt/layers/quantization"
_CONFIG = "sglang/srt/configs/model_config.py"

FOLDER = SGLANG.rejects(
    201,
    "SGLang loads a folder with config.json, or one GGUF file. Add the config.json of the model.",
    f"{_CONFIG}: ModelConfig.__init__",
)
METHOD = SGLANG.rejects(
    202,
    "SGLang has no quantization method of this name, or the settings name none (MLX folders). torchao and HQQ are not "
    "among its methods. Convert the folder, for example with `polyquant convert`.",
    f"{_CONFIG}: ModelConfig._verify_quantization; {_Q}/__init__.py: BASE_QUANTIZATION_METHODS",
)
GPTQ = SGLANG.rejects(
    203,
    "On NVIDIA GPUs SGLang reads GPTQ weights with Marlin kernels only: 4 or 8 bits, sym true, groups -1, 32, 64 or "
    "128. Others remain the method `gptq`, which exists on CPUs with AMX, Intel GPUs and Ascend only.",
    f"{_Q}/gptq/gptq.py: GPTQMarlinConfig.is_gptq_marlin_compatible; {_Q}/__init__.py: BASE_QUANTIZATION_METHODS",
)
MISSING = SGLANG.rejects(
    204,
    "The quantization settings lack an entry that SGLang requires. GPTQ: bits, group_size, desc_act, sym. AWQ: bits, "
    "group_size, zero_point. FP8: activation_scheme. Add it to quantization_config.",
    f"{_Q}/base_config.py: QuantizationConfig.get_from_keys",
)
AWQ = SGLANG.rejects(
    205,
    "SGLang reads AWQ weights of 4 bits; 8 bits only where Marlin takes them without zero points.",
    f"{_Q}/awq/awq.py: AWQConfig.__init__",
)
JOINED = SGLANG.rejects(
    206,
    "SGLang joins q, k and v, and gate and up, into one matrix. Here they are stored differently, for example because "
    "one is in the ignore list. Quantize all parts of a joined layer the same way.",
    f"{_Q}/compressed_tensors/utils.py: should_ignore_layer; {_Q}/utils.py: is_layer_skipped; "
    f"{_Q}/awq/awq.py: is_layer_skipped_awq",
)
SCHEME = SGLANG.rejects(
    207,
    "SGLang has no compressed-tensors scheme for this config group of linear layers. It has: pack-quantized integers "
    "of 4 and 8 bits per channel or group without activations; int8 and FP8 weights with tensor or token activations; "
    "FP8 weights alone per tensor or channel; NVFP4. MXFP4 only for experts. int8 alone: `polyquant convert SRC DST "
    "--codec compressed.i8.dynamic` keeps the codes and quantizes inputs.",
    f"{_Q}/compressed_tensors/compressed_tensors.py: CompressedTensorsConfig._get_scheme_from_parts",
)
TILES = SGLANG.rejects(
    208,
    "SGLang's Marlin kernel needs columns a multiple of 128 and rows a multiple of 64, or 64 and 128, of each joined "
    "matrix. Nothing is padded.",
    "sglang/kernels/jit/csrc/gemm/marlin/gptq_marlin.cuh: is_valid_config",
)
FP8_SETTINGS = SGLANG.rejects(
    209,
    "FP8 settings that SGLang rejects: activation_scheme must be dynamic or static, and dynamic for weights in blocks; "
    "weight_block_size has two sizes.",
    f"{_Q}/fp8.py: Fp8Config.__init__",
)
BLOCKS = SGLANG.rejects(
    210,
    "SGLang joins q, k and v, and gate and up. Blocks must not cross their borders: the rows of every part must be a "
    "multiple of the block, unlike in vLLM those of the last too.",
    f"{_Q}/fp8.py: Fp8LinearMethod.validate_block_quant_shapes",
)
MODELOPT = SGLANG.rejects(
    211,
    "SGLang reads these ModelOpt algorithms: FP8, NVFP4, NVFP4_AWQ, W4A16_NVFP4, MXFP8 and MIXED_PRECISION.",
    f"{_Q}/modelopt_quant.py: ModelOptFp8Config.from_config, ModelOptFp4Config.from_config; {_CONFIG}: "
    "ModelConfig._parse_modelopt_quant_config",
)
MXFP4_DENSE = SGLANG.rejects(
    212,
    "With quant_method mxfp4 SGLang reads packed experts only; packed linear layers do not load.",
    f"{_Q}/mxfp4.py: Mxfp4Config.get_quant_method",
)
GGUF_TYPE = SGLANG.rejects(
    213,
    "A tensor type for which SGLang has no GGUF kernel. It has Q4_0 to Q8_1, Q2_K to Q6_K, IQ1 to IQ4 and floats, but "
    "no MXFP4, NVFP4, Q1_0, Q2_0, TQ1_0 and TQ2_0. Quantize those tensors to another type.",
    f"{_Q}/gguf.py: fused_mul_mat_gguf (DEQUANT_TYPES)",
)
GGUF_SPLIT = SGLANG.rejects(
    214,
    "SGLang reads one GGUF file: the weights in the other members of a split model stay uninitialized. Join them with "
    "`polyquant convert`.",
    "sglang/srt/model_loader/weight_utils.py: gguf_quant_weights_iterator",
)
BNB = SGLANG.needs(
    215,
    "SGLang reads bitsandbytes folders with the package bitsandbytes, and on one GPU only.",
    "sglang/srt/model_loader/loader.py: BitsAndBytesModelLoader",
)
SILENT = SGLANG.rejects(
    216,
    "The tensors and the settings contradict each other: packed or scaled tensors without quantization settings, or "
    "settings without such tensors. SGLang creates layers by the settings, and fails at names and shapes.",
    "sglang/srt/model_loader/loader.py: DefaultModelLoader.load_model",
)
PARALLEL = SGLANG.rejects(
    217,
    "The model cannot be divided among this number of GPUs (--tp): heads, groups, blocks or packed values would be "
    "split. Use fewer GPUs, or smaller groups.",
    f"{_Q}/compressed_tensors/schemes/compressed_tensors_wNa16.py: CompressedTensorsWNA16.create_weights; "
    f"{_Q}/fp8.py: Fp8LinearMethod.validate_block_quant_shapes",
)
MODELSLIM = SGLANG.needs(
    218,
    "An msModelSlim folder, which SGLang reads on Ascend. Its conditions are those of the ASC codes.",
    f"{_CONFIG}: ModelConfig._find_quant_modelslim_config",
)
HOPPER = SGLANG.needs(
    219,
    "MXFP8 weights need a GPU of compute capability 10.0 or newer.",
    f"{_Q}/fp8.py: Fp8Config.get_min_capability",
)
STATIC = SGLANG.miscomputes(
    220,
    "FP8 of ModelOpt quantizes a layer's inputs with its input_scale. Without one, that scale is undefined and the "
    "results are wrong.",
    f"{_Q}/modelopt_quant.py: ModelOptFp8LinearMethod.create_weights, process_weights_after_loading",
)

_METHODS = words(
    """
    fp8 mxfp8 minimax_m3_nvfp4 blockwise_int8 modelopt modelopt_fp8 modelopt_fp4 nvfp4_online modelopt_mixed
    w8a8_int8 w8a8_fp8 awq awq_marlin bitsandbytes gguf gptq gptq_marlin moe_wna16 compressed-tensors w4afp8
    petit_nvfp4 quark quark_mxfp4 auto-round auto-round-int8 modelslim quark_int4fp8_moe humming mxfp_w4a8 mxfp4
    """
)
_ALGORITHMS = words("FP8 NVFP4 NVFP4_AWQ W4A16_NVFP4 MXFP8 MIXED_PRECISION")
_GGUF_TYPES = words(
    """
    f32 f16 bf16 q4_0 q4_1 q5_0 q5_1 q8_0 q8_1 q2_k q3_k q4_k q5_k q6_k iq1_m iq1_s iq2_xxs iq2_xs iq2_s iq3_xxs
    iq3_s iq4_xs iq4_nl
    """
)
_ACTIVATED = frozenset(
    {"naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "pack-quantized"}
)


def _check(model: Model, devices: int) -> Iterator[Finding]:
    if model.gguf is not None:
        yield from _gguf(model)
        return
    if not model.names or model.config is None:
        yield FOLDER.finding("no config.json", file=model.path.name)
        return
    if "quant_model_description.json" in model.names:
        yield MODELSLIM.finding("is read on Ascend", file="quant_model_description.json")
        return
    if model.settings is None:
        if (name := model.first_quantized) is not None:
            yield SILENT.finding("quantized, but config.json has no quantization_config", name)
            return
    elif model.method is None or model.method not in _METHODS:
        said = "no quant_method" if model.method is None else f"quant_method {model.method}"
        yield METHOD.finding(said, file=model.settings_file)
        return
    else:
        if not any(model.quantized()):
            yield SILENT.finding(f"quant_method {model.method}, but no tensor is quantized", file=model.settings_file)
        if (check := _CHECKS.get(model.method)) is not None:
            yield from check(model, model.settings)
        yield from (JOINED.finding(f"joined parts differ: {said}", name) for name, said in model.mixed())
    yield from (PARALLEL.finding(message, tensor) for message, tensor in indivisible(model, devices))


def _gguf(model: Model) -> Iterator[Finding]:
    checkpoint = model.gguf
    assert checkpoint is not None
    for weight in checkpoint.values():
        if weight.codec.name not in _GGUF_TYPES:
            yield GGUF_TYPE.finding(f"type {weight.codec.name}", weight.name)
    if model.split_count > 1:
        yield GGUF_SPLIT.finding(f"one of {model.split_count} files", file=model.path.name)


def _gptq(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    yield from missing(MISSING, model, settings, "bits", "group_size", "desc_act", "sym")
    for where, merged in gptq_settings(settings):
        bits, group, symmetric = merged.get("bits"), merged.get("group_size"), merged.get("sym")
        if bits not in (4, 8) or symmetric is not True or group not in MARLIN_GROUPS:
            said = f"bits {bits}, sym {symmetric}, groups of {group}{where}".lower()
            yield GPTQ.finding(said, file=model.settings_file)
            return
    yield from _tiles(model, "qweight")


def _tiles(model: Model, part: str) -> Iterator[Finding]:
    """Check the joined matrices of layers with this part against the tiles of the Marlin kernel."""
    for parent in dict.fromkeys(name.rpartition(".")[0] for name, _ in model.with_part(part)):
        own = [n for n, _ in model.with_part(part) if n.rpartition(".")[0] == parent]
        joined = [[f"{parent}.{p}" for p in group] for group in FUSED]
        alone = [[n] for n in own if not any(n in group for group in joined)]
        for names in [[n for n in group if n in own] for group in joined] + alone:
            sizes = [size for n in names if (size := model.size(n)) is not None]
            rows, columns = sum(r for r, _ in sizes), sizes[0][1] if sizes else 0
            fits = (columns % 128 == 0 and rows % 64 == 0) or (columns % 64 == 0 and rows % 128 == 0)
            if sizes and not fits:
                yield TILES.finding(f"{rows} rows, {columns} columns", f"{names[0]}.{part}")


def _awq(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    yield from missing(MISSING, model, settings, "bits|w_bit", "group_size|q_group_size", "zero_point")
    bits = integer(settings, "w_bit", "bits")
    if bits is not None and bits != 4 and not (bits == 8 and settings.get("zero_point") is False):
        yield AWQ.finding(f"{bits} bits", file=model.settings_file)


def _compressed(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    listed = list(groups(settings))
    experts = any(".experts." in name for name in model.layers)
    for group in listed:
        if not _has_scheme(group) and not (experts and "mxfp4" in group.form):
            yield SCHEME.finding(f"{group.name}: {group}", file=model.settings_file)
    if {g.weights.bits for g in listed if g.form == "pack-quantized"} <= {4, 8}:
        yield from _tiles(model, "weight_packed") if any(g.form == "pack-quantized" for g in listed) else ()
    if any(g.weights.strategy == "block" for g in listed):
        yield from block_parts(BLOCKS, model, last=True)


def _has_scheme(g: Group) -> bool:
    """The decision of CompressedTensorsConfig._get_scheme_from_parts."""
    w, a = g.weights, g.inputs
    floating = w.kind == "float"
    if not floating and a is None and w.strategy in ("channel", "group") and not w.dynamic:
        return g.form == "pack-quantized" and w.bits in (4, 8)
    if g.form not in _ACTIVATED or not w.symmetric or w.dynamic:
        return False
    if floating and w.bits == 4:
        fits = w.strategy == "tensor_group" and w.group == 16
        return fits and (a is None or (a.strategy == "tensor_group" and a.group == 16 and a.bits == 4))
    if floating:
        if a is None:
            return w.strategy in ("tensor", "channel")
        return w.strategy in ("tensor", "channel", "block") and (a.dynamic or a.strategy == "tensor")
    return (
        a is not None and w.bits == a.bits == 8 and w.strategy in ("tensor", "channel")
        and a.strategy == ("token" if a.dynamic else "tensor")
    )  # fmt: skip


def _fp8(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    yield from missing(MISSING, model, settings, "activation_scheme")
    yield from fp8_settings(FP8_SETTINGS, model, settings)
    yield from block_parts(BLOCKS, model, last=True)


def _modelopt(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    algorithm = settings.get("quant_algo")
    if algorithm not in _ALGORITHMS:
        yield MODELOPT.finding(f"quant_algo {algorithm}", file=model.settings_file)
    if algorithm == "MXFP8":
        yield HOPPER.finding("MXFP8", file=model.settings_file)
    for name, parts in model.with_part("weight_scale") if algorithm == "FP8" else ():
        if "input_scale" not in parts:
            yield STATIC.finding("FP8 without input_scale", name)


def _mxfp4(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    yield from dense_mxfp4(MXFP4_DENSE, model)


def _bitsandbytes(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    yield BNB.finding("needs bitsandbytes", file=model.settings_file)


_CHECKS = {
    "gptq": _gptq, "gptq_marlin": _gptq, "awq": _awq, "awq_marlin": _awq, "compressed-tensors": _compressed,
    "fp8": _fp8, "modelopt": _modelopt, "mxfp4": _mxfp4, "bitsandbytes": _bitsandbytes,
}  # fmt: skip

CONSUMER = Consumer(
    "sglang",
    SGLANG,
    (
        ("GPTQ", "4 or 8 bits, sym, groups -1, 32, 64, 128, also with desc_act; rows and columns that fit Marlin"),
        ("AWQ", "4 bits"),
        (
            "compressed-tensors",
            "pack-quantized 4 and 8 bits, also with activation order; int8 and FP8 weights with matching activations; "
            "FP8 blocks with dynamic activations; NVFP4; MXFP4 experts",
        ),
        ("FP8", "activation_scheme; blocks: dynamic, and rows of every joined part a multiple of the block"),
        ("ModelOpt", "FP8, NVFP4, NVFP4_AWQ, W4A16_NVFP4, MXFP8 (GPU of capability 10.0), MIXED_PRECISION"),
        ("MXFP4", "experts of GPT-OSS and the like"),
        ("bitsandbytes", "one GPU, with the package"),
        ("GGUF", "one file; legacy, K and IQ types"),
        ("torchao, MLX, HQQ", "no"),
    ),
    rules_of(globals().values()),
    _check,
    parallel=True,
)
