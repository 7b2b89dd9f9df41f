"""Ollama: `ollama create` from GGUF files and from folders."""

from __future__ import annotations

from collections.abc import Iterator

from polyquant.analysis.consumers.llama_cpp import metadata_findings, stored_type
from polyquant.analysis.consumers.model import Model
from polyquant.analysis.consumers.parallel import blocks
from polyquant.analysis.consumers.record import Consumer, Program, rules_of, words
from polyquant.types import Finding

__all__ = ["CONSUMER"]

OLLAMA = Program("Ollama", "0.33.0-rc2", "ollama/ollama", "fb3076099")

ARCHITECTURE = OLLAMA.rejects(
    601,
    "`ollama create` has no converter for folders of this architecture. Convert the folder with `polyquant convert SRC "
    "model.gguf`; llama.cpp, which runs the model, knows more.",
    "convert/convert.go: LoadModelMetadata",
)
DTYPE = OLLAMA.rejects(
    602,
    "`ollama create` converts folders of floats, and FP8 in blocks. Packed and int8 tensors are not read, except the "
    "experts of GPT-OSS. Convert the folder with `polyquant convert SRC model.gguf`.",
    "convert/reader_safetensors.go: safetensor.WriteTo",
)
FP8 = OLLAMA.rejects(
    603,
    "FP8 tensors need a block size in config.json (weight_block_size, or block_structure of compressed-tensors) and "
    "one scale per block in F32, F16 or BF16. Scales per tensor or row, and UE8M0 scales, are rejected.",
    "convert/reader_safetensors.go: safetensorsFP8BlockSize, decodeFP8E4M3, readScale",
)
TYPE = OLLAMA.rejects(
    604,
    "Ollama's reader of GGUF headers does not know the size of this type: TQ1_0, TQ2_0, Q2_0, and those of bitnet.cpp, "
    "ik_llama.cpp and Trinity.",
    "fs/ggml/ggml.go: TensorType.TypeSize, Tensor.size",
)
RUNNER = OLLAMA.rejects(
    605,
    "llama.cpp b10488, with which Ollama checks and runs models, rejects or misreads this metadata.",
    "server/create.go: copyLayerWithLlamaQuantize; LLAMA_CPP_VERSION",
)
TEMPLATE = OLLAMA.needs(
    606,
    "No chat template in the file, so that Ollama passes prompts unchanged. Name one in the Modelfile (TEMPLATE).",
    "server/model.go: detectChatTemplate",
)
SPLIT = OLLAMA.needs(
    607,
    "A member of a split model: all files are needed, and their names must follow PREFIX-00001-of-00003.gguf as their "
    "metadata count them. Older versions take one file only.",
    "server/create.go: splitGGUFGroupKey, mergeSplitGGUFLayers",
)
FOLDER = OLLAMA.rejects(
    608,
    "`ollama create` needs config.json and a tokenizer in the folder (tokenizer.json or tokenizer.model).",
    "convert/convert.go: LoadModelMetadata, parseTokenizer",
)

_CONVERTS = words(
    """
    LlamaForCausalLM MllamaForConditionalGeneration Llama4ForConditionalGeneration
    Mistral3ForConditionalGeneration Ministral3ForCausalLM MixtralForCausalLM GemmaForCausalLM Gemma2ForCausalLM
    Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma3TextModel Gemma3nForConditionalGeneration
    Gemma4ForCausalLM Gemma4ForConditionalGeneration Phi3ForCausalLM Qwen2ForCausalLM
    Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
    Olmo3ForCausalLM BertModel NomicBertModel NomicBertMoEModel CohereForCausalLM GptOssForCausalLM
    DeepseekOCRForCausalLM DeepseekV3ForCausalLM Glm4MoeLiteForCausalLM LagunaForCausalLM
    GlmOcrForConditionalGeneration Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration
    Qwen3NextForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration NemotronH_Nano_VL_V2
    NemotronH_Nano_Omni_Reasoning_V3 NemotronHForCausalLM
    """
)
_FLOATS = frozenset({"F32", "F16", "BF16"})
_SIZED = words(
    """
    f32 f16 q4_0 q4_1 q5_0 q5_1 q8_0 q8_1 q2_k q3_k q4_k q5_k q6_k q8_k iq2_xxs iq2_xs iq3_xxs iq1_s iq4_nl
    iq3_s iq2_s iq4_xs i8 i16 i32 i64 f64 iq1_m bf16 mxfp4 nvfp4 q1_0
    """
)
_SCALES = ("weight_scale", "weight_scale_inv")
_TOKENIZERS = frozenset({"tokenizer.json", "tokenizer.model"})


def _check(model: Model, devices: int) -> Iterator[Finding]:
    if model.gguf is not None:
        yield from _gguf(model)
        return
    if not model.names or model.config is None or not (_TOKENIZERS & model.names):
        yield FOLDER.finding("no config.json or no tokenizer", file=model.path.name)
    if model.config is not None and model.architecture not in _CONVERTS:
        yield ARCHITECTURE.finding(f"architecture {model.architecture or 'missing'}", file="config.json")
    yield from _tensors(model)


def _gguf(model: Model) -> Iterator[Finding]:
    checkpoint = model.gguf
    assert checkpoint is not None
    for weight in checkpoint.values():
        if (name := stored_type(weight)) not in _SIZED:
            yield TYPE.finding(f"type {name}", weight.name)
    for _, message in metadata_findings(checkpoint):
        yield RUNNER.finding(message, file=model.path.name)
    if "tokenizer.ggml.model" in checkpoint.metadata and "tokenizer.chat_template" not in checkpoint.metadata:
        yield TEMPLATE.finding("no tokenizer.chat_template", file=model.path.name)
    if model.split_count > 1:
        yield SPLIT.finding(f"one of {model.split_count} files", file=model.path.name)


def _tensors(model: Model) -> Iterator[Finding]:
    """One finding for tensors that are not read, and one for FP8."""
    packed = fp8 = False
    experts = model.architecture == "GptOssForCausalLM"
    for name, stored in model.tensors.items():
        if experts and stored.dtype == "U8" and name.endswith(("_blocks", "_scales")):
            continue
        if stored.dtype == "F8_E4M3":
            if not fp8 and not _readable(model, name):
                yield FP8.finding("an FP8 tensor without blocks and their scales", name)
                fp8 = True
        elif stored.dtype not in _FLOATS and not packed and not _consumed(model, name):
            yield DTYPE.finding(f"dtype {stored.dtype}", name)
            packed = True


def _readable(model: Model, name: str) -> bool:
    """True if an FP8 tensor has a scale per block."""
    parts, block = model.layers.get(name.removesuffix(".weight"), {}), blocks(model)
    scales = [parts[s] for s in _SCALES if s in parts]
    size = model.size(name.removesuffix(".weight"))
    if block is None or size is None or len(scales) != 1 or not _states_blocks(model):
        return False
    expected = (-(-size[0] // block[0]), -(-size[1] // block[1]))
    return scales[0].dtype in _FLOATS and tuple(scales[0].shape) == expected


def _states_blocks(model: Model) -> bool:
    return model.method in ("fp8", "compressed-tensors")


def _consumed(model: Model, name: str) -> bool:
    """True for a scale that is read together with its FP8 tensor."""
    module, _, part = name.rpartition(".")
    weight = model.layers.get(module, {}).get("weight")
    return part in _SCALES and weight is not None and weight.dtype == "F8_E4M3"


CONSUMER = Consumer(
    "ollama",
    OLLAMA,
    (
        ("GGUF", "types with a known size (not TQ1_0, TQ2_0, Q2_0) that llama.cpp b10488 loads; split models"),
        ("folders", "39 architectures in floats or FP8 blocks, and GPT-OSS; with a tokenizer"),
    ),
    rules_of(globals().values()),
    _check,
)
