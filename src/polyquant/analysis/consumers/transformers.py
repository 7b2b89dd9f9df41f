"""transformers: the packages that it needs, and methods whose scales it ignores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polyquant.analysis.consumers.compressed import groups
from polyquant.analysis.consumers.llama_cpp import stored_type
from polyquant.analysis.consumers.model import Model, integer
from polyquant.analysis.consumers.parallel import blocks
from polyquant.analysis.consumers.record import Consumer, Program, rules_of, words
from polyquant.architectures.find import of_config
from polyquant.architectures.separate_experts import first_separate
from polyquant.types import Finding

__all__ = ["CONSUMER"]

TRANSFORMERS = Program("transformers", "5.23.0", "huggingface/transformers")
_Q = "transformers/quantizers"

FOLDER = TRANSFORMERS.rejects(
    301,
    "transformers loads a folder with config.json, or one GGUF file by gguf_file. Add the config.json of the model.",
    "transformers/modeling_utils.py: PreTrainedModel.from_pretrained",
)
UNSCALED = TRANSFORMERS.miscomputes(
    302,
    "transformers does not know this quantization method. It warns, builds a float model and ignores the scales: FP8 "
    "and int8 weights become floats without their scale, and the outputs are noise. ModelOpt's methods are among them. "
    "Convert the folder to compressed-tensors.",
    f"{_Q}/auto.py: AutoHfQuantizer.supports_quant_method",
)
SHAPES = TRANSFORMERS.rejects(
    303,
    "transformers does not know this quantization method and builds a float model, whose shapes packed weights do not "
    "have. Convert the folder to compressed-tensors.",
    f"{_Q}/auto.py: AutoHfQuantizer.supports_quant_method; transformers/modeling_utils.py: _finalize_model_loading",
)
NO_METHOD = TRANSFORMERS.rejects(
    304,
    "quantization_config has no quant_method. MLX folders are written so; only mlx-lm reads them.",
    f"{_Q}/auto.py: AutoHfQuantizer.supports_quant_method",
)
PACKAGE = TRANSFORMERS.needs(
    305,
    "transformers needs other packages for this method: GPTQ optimum and gptqmodel; AWQ gptqmodel and accelerate; "
    "compressed-tensors, bitsandbytes, torchao and HQQ the package of that name; FP8 and MXFP4 accelerate.",
    f"{_Q}/quantizer_*.py: validate_environment",
)
BITS = TRANSFORMERS.rejects(
    306,
    "The number of bits is not one that transformers takes for GPTQ: 2, 3, 4 or 8.",
    "transformers/utils/quantization_config.py: GPTQConfig.post_init",
)
DYNAMIC = TRANSFORMERS.rejects(
    307,
    "GPTQ settings with rules for single layers (`dynamic`). transformers creates the layers with optimum, which "
    "ignores these rules, so sizes do not fit. Load the folder with gptqmodel itself.",
    "optimum/gptq/quantizer.py: GPTQQuantizer.convert_model (optimum 2.3.0)",
)
CPU_GROUP = TRANSFORMERS.needs(
    308,
    "Needs a GPU: gptqmodel's kernel for 4 bits on a CPU takes groups of 32, 64, 128 or 256 columns only, and fails at "
    "the first token.",
    "gptqmodel/nn_modules/qlinear/torch_aten_kernel.py: TorchAtenLinear (gptqmodel 7.7.0), and torch's "
    "_weight_int4pack_mm_for_cpu",
)
ORDER = TRANSFORMERS.rejects(
    309,
    "Current compressed-tensors rejects the activation order `group`. Quantize with actorder weight or none.",
    "compressed_tensors/quantization/quant_args.py: QuantizationArgs (compressed-tensors 0.20.0)",
)
ASYMMETRIC = TRANSFORMERS.rejects(
    310,
    "Packed asymmetric weights (weight_zero_point) do not load: compressed-tensors 0.20.0 creates the layers on the "
    "device `meta` and leaves the zero points unpacked there, so their shapes do not fit. Quantize symmetrically, or "
    "read the folder with vLLM.",
    "compressed_tensors/compressors/pack_quantized/base.py: PackedQuantizationCompressor.compress (0.19.0 and 0.20.0)",
)
BLOCK = TRANSFORMERS.miscomputes(
    311,
    "Without a GPU transformers dequantizes FP8 blocks, and takes the block's size from rows / rows of scales. A "
    "matrix whose rows or columns are not a multiple of the block is read with other blocks: [160, K] with 2 rows of "
    "scales as 80 + 80 instead of 128 + 32. On a GPU the kernels use weight_block_size.",
    "transformers/integrations/finegrained_fp8.py: Fp8Dequantize._dequantize_one",
)
BLOCK_SPLIT = TRANSFORMERS.rejects(
    312,
    "Without a GPU transformers dequantizes FP8 blocks, and rejects a matrix whose sizes are not a multiple of the "
    "number of its scales.",
    "transformers/integrations/finegrained_fp8.py: Fp8Dequantize._dequantize_one",
)
NVFP4 = TRANSFORMERS.rejects(
    313,
    "transformers quantizes to NVFP4 while loading floats; it rejects folders that already are. Those of "
    "compressed-tensors (nvfp4-pack-quantized) load.",
    f"{_Q}/quantizer_nvfp4.py: NVFP4HfQuantizer.validate_environment",
)
SILENT = TRANSFORMERS.miscomputes(
    314,
    "The folder has quantized tensors, but config.json has no quantization_config. transformers builds a float model: "
    "tensors of the float shape are used without scales, others are rejected. ModelOpt's hf_quant_config.json is not "
    "read.",
    "transformers/modeling_utils.py: PreTrainedModel.from_pretrained",
)
GGUF_ARCHITECTURE = TRANSFORMERS.rejects(
    315,
    "transformers does not read GGUF files of this architecture. Convert the file with `polyquant convert`.",
    "transformers/modeling_gguf_pytorch_utils.py: load_gguf_checkpoint (GGUF_SUPPORTED_ARCHITECTURES)",
)
GGUF_TYPE = TRANSFORMERS.rejects(
    316,
    "transformers dequantizes GGUF tensors with the package gguf, which does not know this type (Q8_1, Q8_K, Q1_0 and "
    "Q2_0 among others).",
    "gguf/quants.py: dequantize (gguf 0.19.0)",
)
GGUF_FLOATS = TRANSFORMERS.needs(
    317,
    "transformers needs the package gguf and dequantizes the whole model while loading: it takes the memory of floats.",
    "transformers/modeling_gguf_pytorch_utils.py: load_gguf_checkpoint",
)
GGUF_SCALES = TRANSFORMERS.miscomputes(
    320,
    "transformers dequantizes NVFP4 tensors of GGUF without the scales next to them (X.scale): weights are too large "
    "or too small by that factor.",
    "transformers/modeling_gguf_pytorch_utils.py: load_gguf_checkpoint; gguf/quants.py: NVFP4",
)
EXPERTS = TRANSFORMERS.miscomputes(
    321,
    "transformers has the experts of this architecture in fused tensors, and no conversion from one matrix per expert: "
    "it reports missing and unexpected keys and computes with random experts. vLLM and SGLang read such folders. For "
    "transformers, keep the experts float with a rule, e.g. --rule '*.experts.*=bf16'.",
    "transformers/conversion_mapping.py: _build_checkpoint_conversion_mapping",
)
FP8_SETTINGS = TRANSFORMERS.rejects(
    318,
    "FP8 settings that transformers rejects: activation_scheme must be dynamic or static, weight_block_size has two "
    "positive sizes, scale_fmt is float or ue8m0.",
    "transformers/utils/quantization_config.py: FineGrainedFP8Config.post_init",
)
BNB_CPU = TRANSFORMERS.needs(
    319,
    "Needs a GPU: bitsandbytes on a CPU repacks 4-bit weights by columns, and fails at the first token if they are not "
    "a multiple of the block of 64.",
    "bitsandbytes/functional.py: _convert_weight_packed_for_cpu (bitsandbytes 0.50.2)",
)

_METHODS = words(
    """
    gguf awq bitsandbytes eetq gptq aqlm quanto quark fouroversix fp_quant hqq compressed-tensors fbgemm_fp8
    higgs torchao bitnet vptq spqr fp8 nvfp4 mxfp8 auto-round mxfp4 metal sinq gemma
    """
)
_PACKAGES = {
    "gptq": "optimum and gptqmodel", "awq": "gptqmodel and accelerate", "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes and accelerate", "torchao": "torchao", "fp8": "accelerate", "mxfp4": "accelerate",
    "hqq": "hqq",
}  # fmt: skip
_GGUF_ARCHITECTURES = words(
    """
    llama mistral qwen2 qwen2moe gpt-oss lfm2 qwen3 qwen3moe falcon phi3 bloom t5 t5encoder stablelm gpt2
    starcoder2 mamba nemotron gemma2 gemma3 gemma4 deci minimax-m2
    """
)
_GGUF_TYPES = words(
    """
    f32 f16 f64 i8 i16 i32 i64 bf16 q4_0 q4_1 q5_0 q5_1 q8_0 q2_k q3_k q4_k q5_k q6_k tq1_0 tq2_0 mxfp4 nvfp4
    iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq1_s iq1_m iq4_nl iq4_xs
    """
)
_FLOAT_SIZED = frozenset({"F8_E4M3", "F8_E5M2", "I8"})


def _check(model: Model, devices: int) -> Iterator[Finding]:
    if model.gguf is not None:
        yield from _gguf(model)
        return
    if not model.names or model.config is None:
        yield FOLDER.finding("no config.json", file=model.path.name)
        return
    stated = model.settings is not None and model.settings_file == "config.json"
    if not stated or model.settings is None:
        if (name := model.first_quantized) is not None:
            yield SILENT.finding("quantized, but config.json has no quantization_config", name)
            return
        return
    if model.method is None and not (model.settings.get("load_in_4bit") or model.settings.get("load_in_8bit")):
        yield NO_METHOD.finding("no quant_method", file=model.settings_file)
        return
    if model.method is not None and model.method not in _METHODS:
        yield from _unknown(model)
        return
    if model.method in _PACKAGES:
        yield PACKAGE.finding(f"needs {_PACKAGES[model.method]}", file=model.settings_file)
    yield from _experts(model)
    check = _CHECKS.get(model.method or "")
    if check is not None:
        yield from check(model, model.settings)


def _experts(model: Model) -> Iterator[Finding]:
    """Separate experts of an architecture whose experts transformers fuses."""
    record = of_config(model.config or {})
    stored = {f"{name}.weight": f"{name}.{min(parts)}" for name, parts in model.quantized()}
    first = None if record is None else first_separate(stored, record)
    if first is not None:
        yield EXPERTS.finding("one matrix per expert", stored[first])


def _unknown(model: Model) -> Iterator[Finding]:
    """A method that is ignored: packed tensors do not fit, others lose their scales."""
    said = f"quant_method {model.method} is ignored"
    for name, parts in model.quantized():
        weight = parts.get("weight")
        if weight is None or weight.dtype not in _FLOAT_SIZED:
            yield SHAPES.finding(f"{said}; packed weights do not fit", f"{name}.{min(parts)}")
            return
    for name, parts in model.quantized():
        yield UNSCALED.finding(f"{said}, so its scales are not used", f"{name}.{max(parts)}")
        return


def _gguf(model: Model) -> Iterator[Finding]:
    checkpoint = model.gguf
    assert checkpoint is not None
    architecture = checkpoint.metadata.get("general.architecture", "")
    yield GGUF_FLOATS.finding("is dequantized while loading", file=model.path.name)
    if architecture not in _GGUF_ARCHITECTURES:
        yield GGUF_ARCHITECTURE.finding(f"architecture {architecture}", file=model.path.name)
    for weight in checkpoint.values():
        name = stored_type(weight)
        if name not in _GGUF_TYPES:
            yield GGUF_TYPE.finding(f"type {name}", weight.name)
        elif name != weight.codec.name:
            yield GGUF_SCALES.finding("a scale is not read", weight.name)


def _gptq(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    bits, group = integer(settings, "bits"), integer(settings, "group_size")
    if bits is not None and bits not in (2, 3, 4, 8):
        yield BITS.finding(f"{bits} bits", file=model.settings_file)
    dynamic = settings.get("dynamic")
    if isinstance(dynamic, Mapping) and dynamic:
        yield DYNAMIC.finding(f"{len(dynamic)} rules in `dynamic`", file=model.settings_file)
    for name, _ in model.with_part("qweight") if bits == 4 and group is not None else ():
        size = model.size(name)
        own = group if group != -1 or size is None else size[1]
        if own not in (32, 64, 128, 256):
            yield CPU_GROUP.finding(f"a group of {own} columns", f"{name}.qweight")
            return


def _compressed(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    for group in groups(settings):
        if group.weights.actorder == "group":
            yield ORDER.finding(f"{group.name}: actorder group", file=model.settings_file)
    for name, parts in model.with_part("weight_zero_point"):
        if "weight_packed" in parts:
            yield ASYMMETRIC.finding("packed zero points", f"{name}.weight_zero_point")
            return


def _fp8(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    scheme, form = settings.get("activation_scheme", "dynamic"), settings.get("scale_fmt", "float")
    size = settings.get("weight_block_size")
    if str(scheme).lower() not in ("dynamic", "static") or form not in ("float", "ue8m0"):
        yield FP8_SETTINGS.finding(f"activation_scheme {scheme}, scale_fmt {form}", file=model.settings_file)
    if size is not None and blocks(model) is None:
        yield FP8_SETTINGS.finding(f"weight_block_size {size}", file=model.settings_file)
    yield from _block_sizes(model)


def _block_sizes(model: Model) -> Iterator[Finding]:
    block = blocks(model)
    for name, parts in model.with_part("weight_scale_inv"):
        size, scale = model.size(name), parts["weight_scale_inv"].shape
        if block is None or size is None or len(scale) != 2 or 0 in scale:
            continue
        said = f"[{size[0]}, {size[1]}] with {scale[0]} x {scale[1]} scales"
        if size[0] % scale[0] or size[1] % scale[1]:
            yield BLOCK_SPLIT.finding(said, f"{name}.weight_scale_inv")
        elif any(n > 1 and length // n != b for length, n, b in zip(size, scale, block, strict=True)):
            yield BLOCK.finding(f"{said}, in blocks of {block[0]} x {block[1]}", f"{name}.weight_scale_inv")


def _bitsandbytes(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    for name, _ in model.with_part("weight.quant_map"):
        columns = model.columns(name)
        if columns is not None and columns % 64:
            yield BNB_CPU.finding(f"{columns} columns", f"{name}.weight")
            return


def _nvfp4(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    yield NVFP4.finding("already quantized", file=model.settings_file)


_CHECKS = {
    "gptq": _gptq, "compressed-tensors": _compressed, "fp8": _fp8, "nvfp4": _nvfp4, "bitsandbytes": _bitsandbytes,
}  # fmt: skip

CONSUMER = Consumer(
    "transformers",
    TRANSFORMERS,
    (
        (
            "GPTQ",
            "2, 3, 4 or 8 bits, v1 and v2, activation order; not with rules for single layers; optimum, gptqmodel",
        ),
        ("AWQ", "with gptqmodel"),
        (
            "compressed-tensors",
            "all formats of that package, decompressed at the first token; not packed asymmetric weights (0.20.0), not "
            "activation order by group",
        ),
        ("FP8", "blocks; dequantized without a GPU, then sizes must be multiples of the block"),
        ("MXFP4", "experts of GPT-OSS, dequantized on a CPU"),
        ("bitsandbytes, torchao", "with the package"),
        ("ModelOpt", "no: FP8 is loaded without its scales, packed formats are rejected"),
        ("GGUF", "dequantized; 23 architectures"),
        ("MLX", "no"),
    ),
    rules_of(globals().values()),
    _check,
)
