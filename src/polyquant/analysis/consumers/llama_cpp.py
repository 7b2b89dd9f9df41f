"""llama.cpp: GGUF files of its types and architectures; folders that its converter reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from polyquant.analysis.consumers.compressed import groups
from polyquant.analysis.consumers.model import Model, integer
from polyquant.analysis.consumers.record import Consumer, Program, rules_of, words
from polyquant.types import Checkpoint, Finding, Weight

__all__ = ["CONSUMER", "TYPES", "metadata_findings", "stored_type"]

LLAMA_CPP = Program("llama.cpp", "as in llama-cpp-python 0.3.36", "ggml-org/llama.cpp", "0c1e57098")
_CONVERTER = "conversion/base.py: ModelBase.dequant_model"

FOLDER = LLAMA_CPP.rejects(
    501,
    "llama.cpp reads GGUF files, not folders. Convert the folder with `polyquant convert SRC model.gguf`.",
    "src/llama-model-loader.cpp: llama_model_loader; ggml/src/gguf.cpp: gguf_init_from_file",
)
CONVERTER = LLAMA_CPP.needs(
    502,
    "Its own convert_hf_to_gguf.py does not take this quantization either; it reads GPTQ of 2, 4 and 8 bits, packed "
    "integers per group and FP8 or int8 per channel or block of compressed-tensors, FP8, NVFP4, BitNet and MXFP4 of "
    "GPT-OSS. `polyquant convert` reads more.",
    _CONVERTER,
)
TYPE = LLAMA_CPP.rejects(
    503,
    "A tensor type that llama.cpp does not have: a dialect of bitnet.cpp, ik_llama.cpp or Trinity, whose type numbers "
    "mean something else or nothing here. Convert the file with `polyquant convert`.",
    "ggml/include/ggml.h: enum ggml_type; ggml/src/gguf.cpp: gguf_init_from_reader",
)
ACTIVATION = LLAMA_CPP.rejects(
    504,
    "Q8_1 and Q8_K are the types to which llama.cpp rounds activations. It has no product with such weights.",
    "ggml/src/ggml-cpu/ggml-cpu.c: type_traits_cpu",
)
ARCHITECTURE = LLAMA_CPP.rejects(
    505,
    "llama.cpp has no architecture of this name.",
    "src/llama-arch.cpp: LLM_ARCH_NAMES; src/llama-model.cpp: llama_model_create",
)
KEY = LLAMA_CPP.rejects(
    506,
    "A key that llama.cpp requires is missing: context_length, embedding_length and block_count of the architecture. "
    "Set it with `polyquant edit`.",
    "src/llama-model.cpp: llama_model_base::load_hparams",
)
TOKENIZER = LLAMA_CPP.rejects(
    507,
    "llama.cpp does not know this tokenizer model, or this pre-tokenizer.",
    "src/llama-vocab.cpp: llama_vocab::impl::load",
)
NO_PRE = LLAMA_CPP.miscomputes(
    508,
    "A BPE tokenizer without tokenizer.ggml.pre: llama.cpp warns and splits text by its default rules, so that tokens "
    "differ from those the model was trained on. Convert the model again, or set the key with `polyquant edit`.",
    "src/llama-vocab.cpp: llama_vocab::impl::load",
)
SPLIT = LLAMA_CPP.rejects(
    509,
    "A member of a split model. llama.cpp loads the first, and finds the others by the name "
    "PREFIX-00001-of-00003.gguf; other names are rejected.",
    "src/llama-model-loader.cpp: llama_get_list_splits; src/llama.cpp: llama_split_prefix",
)
EMPTY = LLAMA_CPP.rejects(
    510,
    "The file has no tensors: a vocabulary or an importance matrix, not a model.",
    "src/llama-model-loader.cpp: llama_model_loader",
)

TYPES = words(
    """
    f32 f16 q4_0 q4_1 q5_0 q5_1 q8_0 q8_1 q2_k q3_k q4_k q5_k q6_k q8_k iq2_xxs iq2_xs iq3_xxs iq1_s iq4_nl
    iq3_s iq2_s iq4_xs i8 i16 i32 i64 f64 iq1_m bf16 tq1_0 tq2_0 mxfp4 nvfp4 q1_0 q2_0
    """
)
_ARCHITECTURES = words(
    """
    clip llama llama4 deci falcon grok gpt2 gptj gptneox mpt baichuan starcoder refact bert modern-bert
    nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert bloom stablelm qwen qwen2 qwen2moe
    qwen2vl qwen3 qwen3moe qwen3next qwen3vl qwen3vlmoe qwen35 qwen35moe qwen4exp phi2 phi3 phimoe plamo plamo2
    plamo3 codeshell orion internlm2 minicpm minicpm3 gemma gemma2 gemma3 gemma3n gemma4 gemma4-assistant
    gemma-embedding starcoder2 mamba mamba2 maple jamba falcon-h1 xverse command-r cohere2 cohere2moe dbrx olmo
    olmo2 olmoe muse-glimmer openelm arctic deepseek deepseek2 deepseek2-ocr deepseek32 deepseek4 chatglm glm4
    glm4moe glm-dsa bitnet t5 t5encoder jais jais2 nemotron nemotron_h nemotron_h_moe exaone exaone4 exaone-moe
    rwkv6 rwkv6qwen2 rwkv7 arwkv7 granite granitemoe granitehybrid graniteswitch granite_swa chameleon
    wavtokenizer-dec plm bailingmoe bailingmoe2 bailingmoe3 dots1 dots3note arcee afmoe laguna ernie4_5
    ernie4_5-moe hunyuan-moe hunyuan-dense hunyuan_vl hy_v3 hy_v4 smollm3 gpt-oss lfm2 lfm2moe dream
    smallthinker llada llada-moe seed_oss grovemoe apertus minimax-01 hrm_text minimax-m2 minimax-m3 cogvlm rnd1
    pangu-embedded mistral3 eagle3 dflash mistral4 paddleocr mimo2 step35 spark2_5 llama-embed maincoder
    kimi-linear kimi-k3 glm5-next talkie mellum nanbeige qwen3tts pockettts
    """
)
_TOKENIZERS = words("no_vocab none llama bert gpt2 hybriddna whitespace t5 rwkv test plamo2 gemma4")
_BPE = frozenset({"gpt2", "hybriddna", "whitespace"})
_PRE = words(
    """
    a.x-4.0 afmoe bailingmoe bailingmoe2 bloom chameleon chatglm-bpe codeshell cohere2moe command-r dbrx
    deepseek-coder deepseek-llm deepseek-r1-qwen deepseek-v3 default exaone exaone-moe exaone4 f2llmv2 falcon
    falcon-h1 falcon3 gemma4 gigachat glm4 glm5 gpt-2 gpt-4o gpt3-finnish granite-docling
    granite-embed-multi-311m granite-embed-multi-97m grok-2 hunyuan hunyuan-dense hy_v4 jais jais-2 jina-de
    jina-es jina-v1-en jina-v2-code jina-v2-de jina-v2-es jina-v5-nano joyai-llm kanana2 kimi-k2 kormo laguna
    lfm2 llada-moe llama-bpe llama-v3 llama3 llama4 megrez mellum mellum2 midm-2.0 minerva-7b minicpm5
    minimax-m2 modern-bert mpt olmo phi-2 pixtral poro-chat qwen2 qwen35 refact roberta-bpe sarvam-moe
    seed-coder smaug-bpe smollm solar-open spark2_5 stablelm2 starcoder superbpe talkie tekken tiny_aya trillion
    ufakzeka viking whitespace youtu
    """
)
_REQUIRED = ("context_length", "embedding_length", "block_count")
_MEMBER = re.compile(r".+-(\d{5})-of-\d{5}\.gguf")


def _check(model: Model, devices: int) -> Iterator[Finding]:
    checkpoint = model.gguf
    if checkpoint is None:
        yield FOLDER.finding("is not a GGUF file", file=model.path.name)
        if model.settings is not None and not _converts(model, model.settings):
            yield CONVERTER.finding(f"quant_method {model.method or 'none'}", file=model.settings_file)
        return
    for weight in checkpoint.values():
        name = stored_type(weight)
        if name not in TYPES:
            yield TYPE.finding(f"type {name}", weight.name)
        elif name in ("q8_1", "q8_k"):
            yield ACTIVATION.finding(f"type {name}", weight.name)
    if not len(checkpoint):
        yield EMPTY.finding("no tensors", file=model.path.name)
    for rule, message in metadata_findings(checkpoint):
        yield _RULES[rule].finding(message, file=model.path.name)
    yield from _split(model, checkpoint)


def stored_type(weight: Weight) -> str:
    """The type of a tensor; scales next to it, which llama.cpp reads as well, are a part of polyquant's codec."""
    return weight.codec.name.partition(".scaled")[0]


def metadata_findings(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Metadata that llama.cpp rejects or misreads: (rule, message)."""
    values = checkpoint.metadata
    architecture = values.get("general.architecture", "")
    if architecture not in _ARCHITECTURES:
        yield "architecture", f"architecture {architecture or 'missing'}"
    elif architecture != "clip":
        for key in _REQUIRED:
            if f"{architecture}.{key}" not in values:
                yield "key", f"no {architecture}.{key}"
    tokenizer, pre = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    if tokenizer is None:
        return
    if tokenizer not in _TOKENIZERS:
        yield "tokenizer", f"tokenizer.ggml.model {tokenizer}"
    elif tokenizer in _BPE and not pre:
        yield "no pre", "no tokenizer.ggml.pre"
    elif tokenizer in _BPE and pre not in _PRE:
        yield "tokenizer", f"tokenizer.ggml.pre {pre}"


_RULES = {"architecture": ARCHITECTURE, "key": KEY, "tokenizer": TOKENIZER, "no pre": NO_PRE}


def _split(model: Model, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Opening has checked the names of all members."""
    count, own = checkpoint.metadata.get("split.count"), _MEMBER.fullmatch(model.path.name)
    if isinstance(count, int) and count > 1 and own is not None and int(own[1]) != 1:
        yield SPLIT.finding(f"is not the first of {count} files", file=model.path.name)


def _converts(model: Model, settings: Mapping[str, Any]) -> bool:
    """The decision of dequant_model. Experts of GPT-OSS are read by their architecture."""
    algorithm = settings.get("quant_algo")
    return {
        "bitnet": True,
        "fp8": True,
        "mxfp4": model.model_type == "gpt_oss",
        "gptq": integer(settings, "bits") in (2, 4, 8) and any(True for _ in model.with_part("g_idx")),
        "modelopt": algorithm in ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN"),
        "compressed-tensors": _converts_compressed(settings),
    }.get(model.method or "", False)


def _converts_compressed(settings: Mapping[str, Any]) -> bool:
    listed, form = list(groups(settings)), settings.get("format")
    if form == "nvfp4-pack-quantized" or len(listed) != 1:
        return form == "nvfp4-pack-quantized"
    weights = listed[0].weights
    if form in ("float-quantized", "int-quantized", "naive-quantized"):
        return weights.strategy in ("channel", "block") and weights.group is None
    return form == "pack-quantized" and weights.strategy == "group" and weights.kind == "int"


CONSUMER = Consumer(
    "llama.cpp",
    LLAMA_CPP,
    (
        ("GGUF", "versions 2 and 3 in the byte order of the machine; its own types; 146 architectures; split models"),
        ("folders", "no: convert them"),
    ),
    rules_of(globals().values()),
    _check,
)
