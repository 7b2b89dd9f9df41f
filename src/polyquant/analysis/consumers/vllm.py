"""vLLM on NVIDIA GPUs: quantization methods, their conditions, and layers that it joins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polyquant.analysis.consumers.compressed import Group, groups
from polyquant.analysis.consumers.model import Model, integer
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

VLLM = Program("vLLM", "0.33.0", "vllm-project/vllm", "4ba787ec9")
_Q = "vllm/model_executor/layers/quantization"

FOLDER = VLLM.rejects(
    101,
    "vLLM loads a folder with config.json, which names the architecture. Add the config.json of the model.",
    "vllm/config/model.py: ModelConfig.__post_init__",
)
METHOD = VLLM.rejects(
    102,
    "vLLM has no quantization method of this name, or the settings name none (MLX folders). bitsandbytes and HQQ are "
    "not among its methods. Convert the folder, for example with `polyquant convert`.",
    "vllm/config/model.py: ModelConfig._verify_quantization",
)
GGUF = VLLM.needs(
    103,
    "vLLM itself has no loader for GGUF files: it needs the package vllm-gguf-plugin (extra `extra-quant`). Which "
    "types and architectures that reads was not checked.",
    "vllm/model_executor/model_loader/__init__.py: LoadFormats; extra-quant in the package's metadata",
)
MISSING = VLLM.rejects(
    104,
    "The quantization settings lack an entry that vLLM requires. GPTQ: bits, group_size, desc_act, sym. AWQ: bits, "
    "group_size, zero_point. FP8: activation_scheme. ModelOpt: quant_algo. Add it to quantization_config.",
    f"{_Q}/base_config.py: QuantizationConfig.get_from_keys",
)
GPTQ_TYPE = VLLM.rejects(
    105,
    "vLLM reads GPTQ weights of 4 or 8 bits with symmetric quantization only (sym true). Use compressed-tensors for "
    "other bits and for zero points.",
    f"{_Q}/auto_gptq.py: AutoGPTQConfig.__init__ (TYPE_MAP)",
)
GPTQ_ORDER = VLLM.rejects(
    106,
    "vLLM no longer reads GPTQ weights with activation order in groups (desc_act true and group_size not -1). Quantize "
    "with desc_act false, or dequantize.",
    f"{_Q}/utils/gptq_utils.py: normalize_and_validate_gptq_desc_act",
)
GPTQ_GROUP = VLLM.rejects(
    107,
    "vLLM runs GPTQ weights with Marlin kernels, whose groups are -1 (one per row), 32, 64 or 128 columns.",
    f"{_Q}/utils/marlin_utils.py: verify_marlin_supported (MARLIN_SUPPORTED_GROUP_SIZES)",
)
AWQ_BITS = VLLM.rejects(108, "vLLM reads AWQ weights of 4 bits only.", f"{_Q}/auto_awq.py: AutoAWQConfig.__init__")
AWQ_SHAPE = VLLM.rejects(
    109,
    "An AWQ matrix does not divide into groups of columns, or its rows are not a multiple of 8, the values in a word.",
    f"{_Q}/auto_awq.py: AutoAWQLinearMethod.create_weights",
)
JOINED = VLLM.rejects(
    110,
    "vLLM joins q, k and v, and gate and up, into one matrix. Here they are stored differently, for example because "
    "one is in the ignore list. Quantize all parts of a joined layer the same way.",
    f"{_Q}/utils/quant_utils.py: is_layer_skipped; {_Q}/compressed_tensors/utils.py: should_ignore_layer; "
    f"{_Q}/utils/gptq_utils.py: is_layer_gptq_quantized",
)
SCHEME = VLLM.rejects(
    111,
    "vLLM has no compressed-tensors scheme for this config group. It has: pack-quantized integers of 2 to 8 bits per "
    "channel or group without activations or with dynamic integer ones; int8 and FP8 weights with tensor, token or no "
    "activations; FP8 blocks; NVFP4; MXFP4; MXFP8.",
    f"{_Q}/compressed_tensors/compressed_tensors.py: CompressedTensorsConfig._get_scheme_from_parts",
)
ORDER = VLLM.rejects(
    112,
    "vLLM no longer reads compressed-tensors with activation order `group` or `dynamic` (weight_g_idx). Quantize with "
    "actorder weight or none.",
    f"{_Q}/compressed_tensors/compressed_tensors.py: CompressedTensorsConfig._quantization_scheme_map_from_config",
)
PADDED = VLLM.rejects(
    113,
    "The columns of a packed matrix do not fill whole 32-bit words. vLLM's Marlin kernel takes the number of values in "
    "a word from columns // words, pads wrongly, and its repacking rejects the shape.",
    f"{_Q}/utils/marlin_utils.py: marlin_pad_qweight",
)
SPARSE = VLLM.rejects(
    114,
    "vLLM no longer reads sparse compressed-tensors (sparsity_config).",
    f"{_Q}/compressed_tensors/compressed_tensors.py: CompressedTensorsConfig._parse_sparsity_config",
)
FP8_SETTINGS = VLLM.rejects(
    115,
    "FP8 settings that vLLM rejects: activation_scheme must be dynamic or static, and dynamic for weights in blocks; "
    "weight_block_size has two sizes.",
    f"{_Q}/fp8.py: Fp8Config.__init__",
)
BLOCKS = VLLM.rejects(
    116,
    "vLLM joins q, k and v, and gate and up. Blocks must not cross their borders: the rows of each part except the "
    "last must be a multiple of the block.",
    f"{_Q}/utils/fp8_utils.py: validate_fp8_block_shape; vllm/model_executor/layers/linear.py: "
    "adjust_block_scale_shard",
)
MODELOPT = VLLM.rejects(
    117,
    "vLLM reads these ModelOpt algorithms: FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, W4A16_NVFP4, MXFP8 and "
    "MIXED_PRECISION. INT4 AWQ and MXFP4 are not among them. In a mix, layers may be FP8, NVFP4, W4A16_NVFP4 or MXFP8; "
    "those of another algorithm are taken as floats.",
    f"{_Q}/modelopt.py: ModelOptQuantConfigBase.from_config (QUANT_ALGOS), ModelOptMixedPrecisionConfig",
)
PB_COLUMNS = VLLM.rejects(
    118,
    "FP8_PB_WO weights need columns that are a multiple of 128, and scales with two or four dimensions.",
    f"{_Q}/modelopt.py: KFp8Block128.create_weights",
)
MXFP4_DENSE = VLLM.rejects(
    119,
    "With quant_method mxfp4 vLLM reads packed experts only; linear layers are taken as floats, so packed ones do not "
    "load.",
    f"{_Q}/mxfp4.py: Mxfp4Config.get_quant_method",
)
TORCHAO = VLLM.needs(
    120,
    "vLLM reads torchao folders with the package torchao (0.15 or newer for safetensors); one quant_type.",
    f"{_Q}/torchao.py: TorchAOConfig.from_config; vllm/model_executor/model_loader/default_loader.py: load_weights",
)
DEPRECATED = VLLM.needs(
    121,
    "A deprecated quantization method: vLLM loads it only with --allow-deprecated-quantization.",
    "vllm/config/model.py: ModelConfig._verify_quantization (DEPRECATED_QUANTIZATION_METHODS)",
)
ARM = VLLM.needs(
    122,
    "int4 weights with int8 activations (W4A8): vLLM's kernel for them, Dynamic4bit, runs on ARM CPUs. Whether another "
    "kernel takes them on this machine was not checked.",
    f"{_Q}/compressed_tensors/schemes/compressed_tensors_w4a8_int.py: CompressedTensorsW4A8Int.create_weights",
)
SILENT = VLLM.rejects(
    123,
    "The tensors and the settings contradict each other: packed or scaled tensors without quantization settings, or "
    "settings without such tensors. vLLM creates layers by the settings, and fails at names and shapes.",
    "vllm/model_executor/model_loader/default_loader.py: DefaultModelLoader.load_weights",
)
ASCEND = VLLM.rejects(
    124,
    "An msModelSlim folder. Only vLLM-Ascend reads it: check it with `--target vllm-ascend`.",
    "vllm/config/model.py: ModelConfig._verify_quantization",
)
PARALLEL = VLLM.rejects(
    125,
    "The model cannot be divided among this number of GPUs (--tp): heads, groups, blocks or packed values would be "
    "split. Use fewer GPUs, or smaller groups.",
    "vllm/config/model.py: ModelConfig.verify_with_parallel_config; vllm/distributed/utils.py: "
    "verify_group_size_divides_partition",
)
STATIC = VLLM.miscomputes(
    126,
    "FP8 (one scale) and NVFP4 of ModelOpt quantize a layer's inputs with its input_scale. Without one, that scale is "
    "undefined and the results are wrong. FP8_PER_CHANNEL_PER_TOKEN (codec fp8.e4m3.f32), W4A16_NVFP4 and MXFP8 need "
    "none.",
    f"{_Q}/modelopt.py: KFp8StaticTensor.process, KNvfp4Dynamic.create_weights",
)

_METHODS = words(
    """
    awq auto_awq awq_marlin fp8 fbgemm_fp8 fp_quant modelopt modelopt_fp4 modelopt_mxfp8 modelopt_mixed
    auto_gptq gptq gptq_marlin humming compressed-tensors experts_int8 quark moe_wna16 torchao inc auto-round
    mxfp4 gpt_oss_mxfp4 deepseek_v4_fp8 mxfp8
    """
)
_IN_A_MIX = words("FP8 NVFP4 W4A16_NVFP4 MXFP8")
_ALGORITHMS = words("FP8 FP8_PER_CHANNEL_PER_TOKEN FP8_PB_WO NVFP4 W4A16_NVFP4 MXFP8 MIXED_PRECISION")
_ACTIVATED = frozenset({"naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized"})


def _check(model: Model, devices: int) -> Iterator[Finding]:
    if model.gguf is not None:
        yield GGUF.finding("a GGUF file needs vllm-gguf-plugin", file=model.path.name)
        return
    if not model.names or model.config is None:
        yield FOLDER.finding("no config.json", file=model.path.name)
        return
    if "quant_model_description.json" in model.names:
        yield ASCEND.finding("is read by vLLM-Ascend only", file="quant_model_description.json")
        return
    if model.settings is None:
        if (name := model.first_quantized) is not None:
            yield SILENT.finding("quantized, but config.json has no quantization_config", name)
            return
        yield from (PARALLEL.finding(message, tensor) for message, tensor in indivisible(model, devices))
        return
    if model.method is None or model.method not in _METHODS:
        said = "no quant_method" if model.method is None else f"quant_method {model.method}"
        yield METHOD.finding(said, file=model.settings_file)
        return
    if model.method in ("fbgemm_fp8", "fp_quant"):
        yield DEPRECATED.finding(f"quant_method {model.method}", file=model.settings_file)
    if not any(model.quantized()):
        yield SILENT.finding(f"quant_method {model.method}, but no tensor is quantized", file=model.settings_file)
    check = _CHECKS.get(model.method)
    if check is not None:
        yield from check(model, model.settings)
    yield from (JOINED.finding(f"joined parts differ: {said}", name) for name, said in model.mixed())
    yield from (PARALLEL.finding(message, tensor) for message, tensor in indivisible(model, devices))


def _gptq(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    yield from missing(MISSING, model, settings, "bits", "group_size", "desc_act", "sym")
    for where, merged in gptq_settings(settings):
        bits, group, symmetric = merged.get("bits"), merged.get("group_size"), merged.get("sym")
        if "bits" in merged and "sym" in merged and (bits not in (4, 8) or symmetric is not True):
            yield GPTQ_TYPE.finding(f"bits {bits}, sym {symmetric}{where}".lower(), file=model.settings_file)
        if merged.get("desc_act") and group != -1:
            yield GPTQ_ORDER.finding(f"desc_act with groups of {group}{where}", file=model.settings_file)
        if group is not None and group not in MARLIN_GROUPS:
            yield GPTQ_GROUP.finding(f"groups of {group}{where}", file=model.settings_file)


def _awq(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    yield from missing(MISSING, model, settings, "bits|w_bit", "group_size|q_group_size", "zero_point")
    bits, group = integer(settings, "w_bit", "bits"), integer(settings, "q_group_size", "group_size")
    if bits is not None and bits != 4:
        yield AWQ_BITS.finding(f"{bits} bits", file=model.settings_file)
        return
    for name, _ in model.with_part("qweight"):
        size = model.size(name)
        if size is not None and (size[0] % 8 or (group and group > 0 and size[1] % group)):
            yield AWQ_SHAPE.finding(f"{size[0]} rows, {size[1]} columns, groups of {group}", f"{name}.qweight")


def _compressed(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("targets"):
        yield SPARSE.finding("sparsity_config", file=model.settings_file)
    listed = list(groups(settings))
    for group in listed:
        if group.weights.actorder in ("group", "dynamic"):
            yield ORDER.finding(f"{group.name}: actorder {group.weights.actorder}", file=model.settings_file)
        elif not _has_scheme(group):
            yield SCHEME.finding(f"{group.name}: {group}", file=model.settings_file)
        elif _is_w4a8(group):
            yield ARM.finding(f"{group.name}: {group}", file=model.settings_file)
    bits = {g.weights.bits for g in listed if g.form == "pack-quantized"}
    for name, parts in model.with_part("weight_packed"):
        size = model.size(name)
        if size is None or parts["weight_packed"].dtype != "I32" or len(bits) != 1:
            continue
        values = 32 // next(iter(bits))
        if next(iter(bits)) in (4, 8) and size[1] % values:
            yield PADDED.finding(f"{size[1]} columns, {values} values in a word", f"{name}.weight_packed")
    if any(g.weights.strategy == "block" for g in listed):
        yield from block_parts(BLOCKS, model, last=False)


def _has_scheme(g: Group) -> bool:
    """The decision of CompressedTensorsConfig._get_scheme_from_parts, without those that depend on the GPU."""
    return _float_scheme(g) if g.weights.kind == "float" else _integer_scheme(g)


def _float_scheme(g: Group) -> bool:
    w, a = g.weights, g.inputs
    if w.bits == 4 and w.strategy == "tensor_group" and w.group == 16 and w.symmetric:
        return a is None or (a.kind == "float" and a.bits == 4 and a.strategy == "tensor_group" and a.group == 16)
    if w.strategy == "group" and w.group == 32 and w.symmetric and (w.bits == 4 or w.byte_scales):
        return w.bits in (4, 8)
    return g.form in _ACTIVATED and w.symmetric and not w.dynamic and w.strategy in ("tensor", "channel", "block")


def _integer_scheme(g: Group) -> bool:
    w, a = g.weights, g.inputs
    if g.form == "pack-quantized" and w.strategy in ("channel", "group") and not w.dynamic and 2 <= w.bits <= 8:
        if a is None:
            return w.strategy == "channel" or w.group is not None
        dynamic = a.kind == "int" and a.symmetric and a.dynamic and a.strategy in ("token", "group")
        return (dynamic and a.bits in (4, 8)) or (a.bits == 8 and a.strategy == "tensor" and g.outputs is not None)
    if g.form not in _ACTIVATED or not w.symmetric or w.dynamic or a is None or a.bits != 8:
        return False
    tensors = w.strategy in ("tensor", "channel") and a.strategy == ("token" if a.dynamic else "tensor")
    return tensors if w.bits == 8 else _is_w4a8(g)


def _is_w4a8(g: Group) -> bool:
    w, a = g.weights, g.inputs
    return (
        g.form == "int-quantized" and w.kind == "int" and w.bits == 4 and w.strategy in ("channel", "group")
        and a is not None and a.kind == "int" and a.bits == 8 and a.strategy == "token" and a.dynamic
    )  # fmt: skip


def _fp8(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    yield from missing(MISSING, model, settings, "activation_scheme")
    yield from fp8_settings(FP8_SETTINGS, model, settings)
    yield from block_parts(BLOCKS, model, last=False)


def _modelopt(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    yield from missing(MISSING, model, settings, "quant_algo")
    algorithm = str(settings.get("quant_algo", "")).upper()
    if algorithm and algorithm not in _ALGORITHMS:
        yield MODELOPT.finding(f"quant_algo {settings.get('quant_algo')}", file=model.settings_file)
        return
    layers = settings.get("quantized_layers")
    if algorithm == "MIXED_PRECISION":
        yield from _mixed(model, layers)
    for name, parts in model.with_part("weight_scale"):
        own = layers.get(name) if isinstance(layers, Mapping) else None
        used = str(own.get("quant_algo")).upper() if isinstance(own, Mapping) else algorithm
        if used in ("FP8", "NVFP4") and "input_scale" not in parts:
            yield STATIC.finding(f"{used} without input_scale", name)
    if algorithm == "FP8_PB_WO":
        yield from block_parts(BLOCKS, model, last=False)
        for name, parts in model.with_part("weight_scale"):
            size, scale = model.size(name), parts["weight_scale"].shape
            if size is not None and (size[1] % 128 or len(scale) not in (2, 4)):
                yield PB_COLUMNS.finding(f"{size[1]} columns, scales {list(scale)}", f"{name}.weight_scale")


def _mixed(model: Model, layers: object) -> Iterator[Finding]:
    """A finding for the first layer of each algorithm that is not read in a mix."""
    seen = set[str]()
    if not isinstance(layers, Mapping) or not layers:
        yield MODELOPT.finding("MIXED_PRECISION without quantized_layers", file=model.settings_file)
        return
    for name, layer in layers.items():
        algorithm = str(layer.get("quant_algo") if isinstance(layer, Mapping) else layer)
        if algorithm.upper() not in _IN_A_MIX and algorithm not in seen:
            seen.add(algorithm)
            yield MODELOPT.finding(f"quant_algo {algorithm} in a mix", name)


def _mxfp4(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    yield from dense_mxfp4(MXFP4_DENSE, model)


def _torchao(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    yield TORCHAO.finding("needs torchao", file=model.settings_file)


_CHECKS = {
    "gptq": _gptq, "gptq_marlin": _gptq, "auto_gptq": _gptq, "awq": _awq, "awq_marlin": _awq, "auto_awq": _awq,
    "compressed-tensors": _compressed, "fp8": _fp8, "modelopt": _modelopt, "mxfp4": _mxfp4, "torchao": _torchao,
}  # fmt: skip

CONSUMER = Consumer(
    "vllm",
    VLLM,
    (
        ("GPTQ", "4 or 8 bits, sym, groups -1, 32, 64, 128; desc_act only with group -1; v1 and v2"),
        ("AWQ", "4 bits; rows a multiple of 8; groups divide the columns"),
        (
            "compressed-tensors",
            "pack-quantized 2 to 8 bits per channel or group; int8 and FP8 weights with matching activations; FP8 "
            "blocks; NVFP4; MXFP4; MXFP8; no activation order by group, no sparsity",
        ),
        ("FP8", "activation_scheme; blocks: dynamic, and rows of joined parts a multiple of the block"),
        ("ModelOpt", "FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, W4A16_NVFP4, MXFP8, MIXED_PRECISION"),
        ("MXFP4", "experts of GPT-OSS and the like"),
        ("torchao", "with the package"),
        ("GGUF", "with vllm-gguf-plugin (not checked)"),
        ("bitsandbytes, MLX, HQQ", "no"),
    ),
    rules_of(globals().values()),
    _check,
    parallel=True,
)
