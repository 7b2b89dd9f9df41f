"""Tokenizer settings that llama.cpp's converter writes per model family, beyond the tokenizer files.

| column | meaning |
|---|---|
| model_types | config.json's `model_type` |
| pre | pre-tokenizer names: the first that splits like the family's tokenizer is written (others are equivalent) |
| tokens | special tokens by their text, where the files name none |
| ids | special tokens by their id, overriding the files |
| ids_in_config | special tokens by the key of config.json with their id, overriding the files |
| turn_end | the first of several `eos_token_id` in generation_config.json is eot |
| adds, default_adds | `add_bos_token`, ...: overriding the files; used if the files have none |
| space_prefix | `add_space_prefix`: False is written, None is omitted (llama.cpp adds a space), "files": as in files |
| added_first | an added token's type and score come from tokenizer.json, not from tokenizer.model |
| raw | merges over the text itself instead of bytes: tokenizer model `gemma4` |
| visible | control tokens that are shown in an answer |
| vocab, lacks | the row applies only to models with this vocabulary size; without this key in config.json |

Source: the `set_vocab` methods of llama.cpp's converter, and for `pre` its table of vocabularies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Family", "of"]


@dataclass(frozen=True, slots=True)
class Family:
    """A row: see the module's table."""

    model_types: tuple[str, ...]
    pre: tuple[str, ...] = ()
    tokens: Mapping[str, str] = field(default_factory=dict)
    ids: Mapping[str, int] = field(default_factory=dict)
    ids_in_config: Mapping[str, str] = field(default_factory=dict)
    turn_end: bool = False
    adds: Mapping[str, bool] = field(default_factory=dict)
    default_adds: Mapping[str, bool] = field(default_factory=dict)
    space_prefix: bool | Literal["files"] | None = "files"
    added_first: bool = False
    raw: bool = False
    visible: tuple[str, ...] = ()
    vocab: int | None = None
    lacks: str = ""


_GLM = {"eos": "<|endoftext|>", "eot": "<|user|>", "unk": "<|endoftext|>", "bos": "<|endoftext|>"}
_GLM_MOE = {"bos": "[gMASK]", "eot": "<|user|>", "unk": "<|endoftext|>", "eom": "<|observation|>"}
_VISIBLE = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>')

FAMILIES = (
    Family(("llama",), vocab=32016, ids={"eot": 32010}, space_prefix=None),  # Code Llama
    Family(("llama",), vocab=49152, adds={"bos": False}, space_prefix=None),  # Granite's small models
    Family(("llama", "mistral", "mixtral", "baichuan", "minicpm", "minicpm3", "internlm3", "ernie4_5", "ernie4_5_moe",
            "orion", "xverse"),
           space_prefix=None),
    Family(("phi3", "phimoe"), pre=("dbrx", "gpt-4o"), space_prefix=None, added_first=True),
    Family(("nemotron",), ids={"pad": 0, "unk": 1}, space_prefix=None),
    Family(("gemma",), ids={"eot": 107}, space_prefix=False),
    Family(("gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text"), space_prefix=False),
    Family(("gemma4", "gemma4_text"), adds={"bos": True}, space_prefix=False, raw=True, visible=_VISIBLE),
    Family(("phi",), pre=("phi-2",), adds={"bos": False}),
    Family(("gpt_neox", "mamba", "mamba2", "mpt"), pre=("mpt",)),
    Family(("modernbert",), pre=("modern-bert",), default_adds={"bos": True, "eos": True, "sep": True}),
    Family(("bert", "nomic_bert"), pre=("bert-bge",)),
    Family(("roberta",), pre=("roberta-bpe",)),
    Family(("eurobert",), default_adds={"bos": False}),
    Family(("falcon",), pre=("falcon", "falcon3")),
    Family(("falcon_h1",), pre=("falcon-h1",)),
    Family(("lfm2", "lfm2_moe"), pre=("lfm2",)),
    Family(("llama4", "llama4_text"), pre=("llama4",)),
    Family(("minimax", "minimax_m2"), pre=("minimax-m2",)),
    Family(("glm", "glm4", "glm4v"), pre=("glm4",), tokens=_GLM),
    Family(("glm4_moe", "glm4_moe_lite", "glm4v_moe"), pre=("glm4",), tokens=_GLM_MOE),
    Family(("chatglm",), pre=("chatglm-bpe",), tokens={k: v for k, v in _GLM.items() if k != "bos"},
        adds={"bos": False}),
    Family(("olmo", "olmoe"), pre=("olmo", "dbrx")),
    Family(("olmo2", "olmo3", "dbrx", "granitemoehybrid"), pre=("dbrx", "olmo", "refact")),
    Family(("granite", "granitemoe", "granitemoeshared"), pre=("refact", "dbrx")),
    Family(("starcoder2", "gpt_bigcode"), pre=("starcoder",)),
    Family(("stablelm",), pre=("stablelm2",)),
    Family(("cohere", "cohere2"), pre=("command-r",)),
    Family(("exaone",), pre=("exaone",)),
    Family(("exaone4",), pre=("exaone4",)),
    Family(("hunyuan_v1_moe",), pre=("hunyuan",)),
    Family(("hunyuan_v1_dense",), pre=("hunyuan-dense",), ids_in_config={"eos": "eod_token_id"}, turn_end=True),
    Family(("nemotron_h",), adds={"bos": True}, lacks="num_experts_per_tok"),
)  # fmt: skip
_OTHER = Family(())


def of(config: Mapping[str, Any]) -> Family:
    """Return the row of a model, or one without effect. An architecture inside `text_config` counts."""
    inner = config.get("text_config")
    for body in (config, inner if isinstance(inner, Mapping) else {}):
        kind, rows = body.get("model_type"), body.get("vocab_size")
        for family in FAMILIES:
            if kind in family.model_types and family.vocab in (None, rows) and family.lacks not in body:
                return family
    return _OTHER
