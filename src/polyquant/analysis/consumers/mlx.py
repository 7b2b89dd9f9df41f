"""mlx-lm: its own folders, AWQ, and folders of other programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polyquant.analysis.consumers.compressed import groups
from polyquant.analysis.consumers.model import Model, Stored, integer
from polyquant.analysis.consumers.record import Consumer, Program, rules_of, words
from polyquant.types import Finding

__all__ = ["CONSUMER"]

MLX = Program("mlx-lm", "0.32.2", "ml-explore/mlx-lm")
_LOAD = "mlx_lm/utils.py: load_model"

FOLDER = MLX.rejects(401, "mlx-lm loads a folder with config.json. Add the config.json of the model.", _LOAD)
GGUF = MLX.rejects(
    402, "mlx-lm does not load GGUF files. Convert the file to a folder with `polyquant convert`.", _LOAD
)
FILES = MLX.rejects(
    403,
    "mlx-lm reads weight files named model*.safetensors only. Rename them, and the index with them.",
    _LOAD,
)
METHOD = MLX.rejects(
    404,
    "mlx-lm has no reader for this quantization method: its tensors are not in the model, and loading is strict. It "
    "reads its own form, AWQ, MXFP4 of GPT-OSS and, for some model types, others. Quantize with mlx_lm.convert.",
    f"{_LOAD}; mlx/nn/layers/base.py: Module.load_weights",
)
NO_METHOD = MLX.rejects(
    405,
    "quantization_config has no quant_method and config.json no entry `quantization`. mlx-lm needs one of them.",
    _LOAD,
)
FORMAT = MLX.rejects(
    406,
    "mlx-lm rejects this format of compressed-tensors. It takes pack-quantized, nvfp4-pack-quantized and "
    "mxfp4-pack-quantized, if the model type renames their tensors.",
    "mlx_lm/utils.py: _compressed_tensors_quantization",
)
NAMES = MLX.rejects(
    407,
    "The model type of this folder does not rename the tensors of other programs (weight_packed, weight_scale, "
    "weight_scale_inv), and loading is strict. Only deepseek_v3, kimi and a few others do.",
    f"{_LOAD}; mlx_lm/models/*.py: Model.sanitize",
)
ALGORITHM = MLX.rejects(408, "Of ModelOpt's algorithms mlx-lm takes NVFP4 only.", _LOAD)
GPTQ_INDEX = MLX.rejects(
    409,
    "mlx-lm rejects GPTQ folders with g_idx, even if it is sorted; gptqmodel always writes it.",
    "mlx_lm/utils.py: _transform_awq_weights",
)
GPTQ_LAYOUT = MLX.rejects(
    410,
    "mlx-lm unpacks GPTQ weights as AWQ, along the rows instead of the columns, so their shapes do not fit. Convert "
    "the folder to AWQ or MLX.",
    "mlx_lm/utils.py: _transform_awq_weights",
)
BITS = MLX.rejects(411, "mlx-lm reads AWQ and GPTQ weights of 4 bits only.", "mlx_lm/utils.py: _transform_awq_weights")
GROUP = MLX.rejects(
    412,
    "mlx has no kernel for this group size, number of bits or mode. Affine: 1, 2, 3, 4, 5, 6 or 8 bits in groups of "
    "32, 64 or 128; mxfp4: 4 bits, 32; nvfp4: 4 bits, 16; mxfp8: 8 bits, 32.",
    "mlx/nn/layers/quantized.py: QuantizedLinear (mlx 0.32.4, mx.quantize)",
)
SIZES = MLX.rejects(
    413,
    "The entry of `quantization` for this layer contradicts its tensors: words and scales do not give its bits and "
    "group size. Without an entry for the layer mlx-lm takes both from the tensors.",
    "mlx_lm/utils.py: load_model (class_predicate), infer_quant_config",
)
SILENT = MLX.rejects(
    414,
    "The folder has quantized tensors, but config.json has neither `quantization` nor quantization_config.",
    _LOAD,
)
SIGNED = MLX.miscomputes(
    415,
    "mlx-lm reads packed weights of compressed-tensors as 4 bits with the zero point 8. With other bits every weight "
    "is shifted.",
    "mlx_lm/models/deepseek_v3.py: Model.sanitize",
)
ARCHITECTURE = MLX.rejects(
    416,
    "mlx-lm has no model of this type.",
    "mlx_lm/utils.py: _get_classes",
)

_BY_AWQ = ("awq", "gptq")
_KNOWN = frozenset({"bitnet", "mxfp4", "mxfp8", "fp8", "compressed-tensors", "modelopt", *_BY_AWQ})
_RENAMES_PACKED = frozenset({"deepseek_v3", "kimi_k2", "joyai_llm_flash", "kimi_k25", "kimi_k3", "mistral4"})
_RENAMES_FP8 = words(
    """
    deepseek_v3 kimi_k2 joyai_llm_flash kimi_k25 deepseek_v32 mimo_v2_flash minimax minimax_m2 minimax_m3_vl
    ministral3 mistral4 muse_spark
    """
)
_FORMATS = frozenset({"pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"})
_MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
_BITS, _GROUPS = (1, 2, 3, 4, 5, 6, 8), (32, 64, 128)
_TYPES = words(
    """
    Klear afm7 afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear bailing_moe_v3 bitnet
    cohere cohere2 dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v41 deepseek_v41_text dots1
    ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 falcon_mamba gemma gemma2 gemma3 gemma3_text
    gemma3n gemma4 gemma4_text gemma4_unified glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode
    gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid helium hunyuan hunyuan_v1_dense internlm2
    internlm3 iquestcoder iquestloopcoder jamba joyai_llm_flash kimi_k2 kimi_k25 kimi_k3 kimi_linear kimi_vl
    laguna lfm2-vl lfm2 lfm2_moe lille-130m llama llama4 llama4_text llava longcat_flash longcat_flash_ngram
    mamba mamba2 mellum mimo mimo_v2_flash minicpm minicpm3 minimax minimax_m2 minimax_m3_vl ministral3 mistral
    mistral3 mistral4 mixtral muse_glimmer muse_spark nanbeige nanochat nemotron-nas nemotron nemotron_h olmo
    olmo2 olmo3 olmo_hybrid olmoe openelm phi phi-msft phi3 phi3small phimoe phixtral pixtral plamo plamo2
    plamo3 prism_hadamard_qwen35 qwen qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe
    qwen3_next qwen3_vl qwen3_vl_moe recurrent_gemma rwkv7 seed_oss smollm3 solar_open spark2_5 stablelm
    starcoder2 step3p5 talkie telechat3 xverse youtu_llm
    """
)


def _check(model: Model, devices: int) -> Iterator[Finding]:
    if model.gguf is not None:
        yield GGUF.finding("is a GGUF file", file=model.path.name)
        return
    config = model.config
    if not model.names or config is None:
        yield FOLDER.finding("no config.json", file=model.path.name)
        return
    if not any(n.startswith("model") and n.endswith(".safetensors") for n in model.names):
        yield FILES.finding("no file model*.safetensors", file=model.path.name)
    if model.model_type not in _TYPES and "model_file" not in config:
        yield ARCHITECTURE.finding(f"model_type {model.model_type}", file="config.json")
    own = config.get("quantization")
    if isinstance(own, Mapping):
        yield from _own(model, own)
    elif model.settings is None:
        if (name := model.first_quantized) is not None:
            yield SILENT.finding("quantized, but not described in config.json", name)
    elif model.method is None:
        yield NO_METHOD.finding("no quant_method", file=model.settings_file)
    elif model.method not in _KNOWN:
        yield METHOD.finding(f"quant_method {model.method}", file=model.settings_file)
    else:
        check = _CHECKS.get(model.method)
        if check is not None:
            yield from check(model, model.settings)


def _own(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Check folders of mlx-lm: bits and groups from the tensors, or as stated for a layer."""
    for name, parts in model.with_part("scales"):
        weight, scales = parts.get("weight"), parts["scales"]
        if weight is None or not weight.shape or not scales.shape or not scales.shape[-1]:
            continue
        stated = settings.get(name)
        byte_scales = scales.dtype == "U8"
        if isinstance(stated, Mapping):
            bits = integer(stated, "bits") or 0
            group, mode = integer(stated, "group_size") or 0, stated.get("mode", "affine")
            said = f"{bits} bits, groups of {group}, mode {mode}"
            if not _has_kernel(bits, group, mode):
                yield GROUP.finding(said, f"{name}.scales")
            elif weight.shape[-1] * 32 != bits * group * scales.shape[-1]:
                yield SIZES.finding(
                    f"{said}, words {list(weight.shape)}, scales {list(scales.shape)}", f"{name}.scales"
                )
        else:
            yield from _inferred(model, name, weight, scales, byte_scales=byte_scales)


def _inferred(model: Model, name: str, weight: Stored, scales: Stored, *, byte_scales: bool) -> Iterator[Finding]:
    """Check a layer without an entry: some bits and group with a kernel must give its words and scales."""
    product = weight.shape[-1] * 32 / scales.shape[-1]  # bits x group
    columns = model.columns(name)
    if columns:
        bits, group = weight.shape[-1] * 32 // columns, columns // scales.shape[-1]
        pairs = [(bits, group)]
    else:
        pairs = [(b, g) for b in _BITS for g in (16, *_GROUPS) if b * g == product]
    modes = tuple(_MODES) if byte_scales else ("affine",)
    if not any(_has_kernel(b, g, mode) for b, g in pairs for mode in modes):
        said = f"{pairs[0][0]} bits, groups of {pairs[0][1]}" if pairs else f"{product:g} bits in a group"
        yield GROUP.finding(said, f"{name}.scales")


def _has_kernel(bits: int, group: int, mode: object) -> bool:
    if mode == "affine":
        return bits in _BITS and group in _GROUPS
    return isinstance(mode, str) and _MODES.get(mode) == (bits, group)


def _packed_words(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Check GPTQ and AWQ folders."""
    bits = integer(settings, "bits")
    if bits is not None and bits != 4:
        yield BITS.finding(f"{bits} bits", file=model.settings_file)
        return
    for name, _ in model.with_part("g_idx"):
        yield GPTQ_INDEX.finding("g_idx", f"{name}.g_idx")
        return
    for name, parts in model.with_part("qweight"):
        words, scales = parts["qweight"].shape, parts["scales"].shape if "scales" in parts else ()
        if len(words) != 2 or len(scales) != 2:
            continue
        if words[1] == scales[1]:
            yield GPTQ_LAYOUT.finding("is packed along the columns", f"{name}.qweight")
            return
        group = words[0] // scales[0] if scales[0] else 0
        if group not in _GROUPS or words[0] % group:
            yield GROUP.finding(f"4 bits, groups of {group}", f"{name}.scales")


def _compressed(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    form = settings.get("format")
    if form not in _FORMATS:
        yield FORMAT.finding(f"format {form}", file=model.settings_file)
        return
    if model.model_type not in _RENAMES_PACKED or form == "nvfp4-pack-quantized":
        yield from _foreign(model, "weight_packed")
        return
    for group in groups(settings):
        if form == "pack-quantized" and group.weights.bits != 4:
            yield SIGNED.finding(f"{group.name}: {group}", file=model.settings_file)
        elif form == "pack-quantized" and not (group.weights.symmetric and group.weights.group in _GROUPS):
            yield GROUP.finding(f"{group.name}: {group}", file=model.settings_file)


def _foreign(model: Model, part: str) -> Iterator[Finding]:
    for name, _ in model.with_part(part):
        yield NAMES.finding(f"model type {model.model_type or 'unknown'}", f"{name}.{part}")
        return


def _modelopt(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    algorithm = settings.get("quant_algo")
    if algorithm != "NVFP4":
        yield ALGORITHM.finding(f"quant_algo {algorithm}", file=model.settings_file)
    else:
        yield from _foreign(model, "weight_scale_2")


def _fp8(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    if model.model_type not in _RENAMES_FP8:
        yield from _foreign(model, "weight_scale_inv")
        yield from _foreign(model, "weight_scale")


_CHECKS = {
    "awq": _packed_words, "gptq": _packed_words, "compressed-tensors": _compressed, "modelopt": _modelopt, "fp8": _fp8,
}  # fmt: skip

CONSUMER = Consumer(
    "mlx",
    MLX,
    (
        ("MLX", "affine 1, 2, 3, 4, 5, 6, 8 bits in groups of 32, 64, 128; mxfp4, nvfp4, mxfp8"),
        ("AWQ", "4 bits, groups of 32, 64, 128; bits and groups are taken from the tensors"),
        ("GPTQ", "no: g_idx is rejected, and without it the layout is taken for AWQ's"),
        ("MXFP4", "experts of GPT-OSS"),
        ("compressed-tensors", "4 bits symmetric for DeepSeek V3 and Kimi; otherwise no"),
        ("FP8", "blocks of 128 for DeepSeek V3, MiniMax, Mistral and a few others; otherwise no"),
        ("ModelOpt", "NVFP4 of some model types; otherwise no"),
        ("GGUF, bitsandbytes, torchao", "no"),
    ),
    rules_of(globals().values()),
    _check,
)
