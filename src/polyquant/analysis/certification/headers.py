"""Compare everything that runtimes read except tensors: the architecture, hyper-parameters, metadata and config.json.

The source is translated to the target's naming scheme, and both are read by the target's rules. What GGUF cannot store
is then missing on both sides, so that it gives no false finding. Entries that the record does not know are compared as
they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from polyquant.analysis.certification.sides import architecture_of, constant, hyper_of
from polyquant.architectures import translate
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.record import Architecture
from polyquant.errors import PolyquantError, printable
from polyquant.types import Checkpoint, Translation

__all__ = ["HeaderCheck", "check_headers", "shown"]

_RELATIVE = 1e-5
_GROUPS = {
    "CER031": "layers hidden feed_forward heads kv_heads head_dim vocab context head_dim_swa full_kv_heads "
    "layer_kv_heads layer_feed_forward recurrent q_lora kv_lora rope_head nope_head value_head shared_kv_layers "
    "double_wide per_layer_input ssm_conv ssm_inner ssm_state ssm_heads ssm_groups",
    "CER032": "norm_eps eps group_eps",
    "CER033": "rope_theta rope rotated rope_theta_swa rotating rope_freqs rotary",
    "CER034": "windows window sliding attention_softcap logit_softcap attention_scale temperature temperature_floor "
    "unit_heads clip",
    "CER035": "experts experts_used expert_feed_forward shared_feed_forward shared_experts first_dense gating "
    "expert_norm expert_scale expert_groups expert_groups_used",
    "CER036": "activation",
    "CER037": "embedding_scale residual_scale logit_scale",
    "CER028": "tied",
}
_CODES = {name: code for code, names in _GROUPS.items() for name in names.split()}
_WORDS = (
    ("CER032", ("eps",)),
    ("CER033", ("rope", "rotary")),
    ("CER035", ("expert", "router", "topk", "top_k", "moe")),
    ("CER034", ("window", "softcap", "capping", "attention.scale", "temperature", "clamp")),
    ("CER037", ("multiplier", "scaling", "scale")),
    ("CER036", ("act_fn", "hidden_act", "activation")),
    ("CER031", ("length", "count", "_size", "block", "num_", "dim")),
)
_IGNORED_CONFIG = frozenset({
    "_attn_implementation", "_name_or_path", "architectures", "attention_dropout", "attention_dropout_prob",
    "attention_probs_dropout_prob", "attn_implementation", "attn_pdrop", "auto_map", "bos_token_id",
    "cache_implementation", "chunk_size_feed_forward", "classifier_dropout", "cls_token_id",
    "decoder_start_token_id", "dropout", "dtype", "embd_pdrop", "embedding_dropout", "eos_token_id",
    "finetuning_task", "gradient_checkpointing", "hidden_dropout", "hidden_dropout_prob", "id2label",
    "initializer_range", "input_jitter_noise", "is_encoder_decoder", "label2id", "max_position_embeddings",
    "max_window_layers", "mlp_dropout", "model_max_length", "model_type", "output_attentions",
    "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type",
    "quantization_bit", "quantization_config", "rescale_every", "resid_dropout", "resid_pdrop", "return_dict",
    "router_aux_loss_coef", "router_jitter_noise", "sep_token_id", "summary_first_dropout",
    "task_specific_params", "tie_encoder_decoder", "tokenizer_class", "torch_dtype", "torchscript",
    "transformers_version", "unk_token_id", "use_cache", "use_mambapy",
})  # fmt: skip
"""Entries of config.json without an effect on inference, or covered by the tokenizer or Hyper."""


@dataclass(frozen=True, slots=True)
class HeaderCheck:
    """entries: (name, expected, found, code or "") of everything compared. problem: why nothing was compared.

    lost: properties of the source that the target's format cannot express.
    """

    entries: tuple[tuple[str, Any, Any, str], ...] = ()
    problem: str = ""
    lost: tuple[str, ...] = ()

    @property
    def differing(self) -> Iterator[tuple[str, Any, Any, str]]:
        """The entries that differ."""
        return (entry for entry in self.entries if entry[3])


def check_headers(source: Checkpoint, target: Checkpoint, *, as_gguf: bool = False) -> HeaderCheck:
    """Compare both headers in the target's naming scheme.

    as_gguf: compare two folders in GGUF's scheme, as their tensors were.
    """
    try:
        if as_gguf and source.naming == target.naming != "gguf":
            a, b = _as_gguf(source), _as_gguf(target)
            return HeaderCheck(tuple(_all(a, b)))
        entries = tuple(_all(_translated(source, target), target))
        return HeaderCheck((*entries, *_activation(source, target)), lost=_lost(source, target))
    except PolyquantError as problem:
        return HeaderCheck(problem=str(problem))


def _activation(source: Checkpoint, target: Checkpoint) -> Iterator[tuple[str, Any, Any, str]]:
    """The activation, which GGUF implies by the architecture: llama.cpp's `bitnet` has another than BitNet."""
    mine, theirs = architecture_of(source), architecture_of(target)
    if source.naming == target.naming or mine is None or theirs is None or mine.name == theirs.name:
        return
    a, b = hyper_of(source, mine), hyper_of(target, theirs)
    if a is not None and b is not None:
        yield "activation", a.activation, b.activation, "" if a.activation == b.activation else "CER036"


def _translated(source: Checkpoint, target: Checkpoint) -> Checkpoint:
    """The source's headers as the target's format has them; its tensors by the target's names, without data."""
    if source.naming == target.naming:
        return source
    if target.naming == "gguf":
        return _as_gguf(source, target)
    translation = translate.to_hf(source)
    config = json.loads(translation.files["config.json"])
    weights = {t.target: replace(source[t.sources[0]], name=t.target, shape=t.shape) for t in translation.tensors}
    return replace(source, naming="hf", metadata={}, config=config, weights=weights)


def _as_gguf(source: Checkpoint, target: Checkpoint | None = None) -> Checkpoint:
    """A folder with the names and the metadata of a GGUF file."""
    translation = translate.to_gguf(source, with_tokenizer=False) if target is None else _to_gguf(source, target)
    metadata = {key: meta.value for key, meta in translation.metadata.items()}
    weights = {t.target: replace(source[t.sources[0]], name=t.target, shape=t.shape) for t in translation.tensors}
    weights |= {name: constant(name, values).weights[0] for name, values in translation.constants.items()}
    return replace(source, naming="gguf", metadata=metadata, config={}, weights=weights)


def _lost(source: Checkpoint, target: Checkpoint) -> tuple[str, ...]:
    if source.naming == "gguf" or target.naming != "gguf":
        return ()
    return tuple(_to_gguf(source, target).warnings)


def _to_gguf(source: Checkpoint, target: Checkpoint) -> Translation:
    """Translate to the target's architecture if the model can have it, else to the usual one."""
    label = target.metadata.get("general.architecture")
    try:
        return translate.to_gguf(source, architecture=str(label), with_tokenizer=False)
    except PolyquantError:
        return translate.to_gguf(source, with_tokenizer=False)


def _all(wanted: Checkpoint, target: Checkpoint) -> Iterator[tuple[str, Any, Any, str]]:
    mine, theirs = architecture_of(wanted), architecture_of(target)
    if wanted.naming == "gguf" or mine is not None or theirs is not None:
        labels = _label(wanted, mine), _label(target, theirs)
        yield "architecture", *labels, "" if labels[0] == labels[1] else "CER030"
        if labels[0] != labels[1]:
            return
    compared: set[str] = set()
    if mine is not None and theirs is not None:
        for name, a, b in _hyper(wanted, target, mine, theirs):
            compared.add(name)
            yield name, a, b, "" if _same(a, b) else _CODES.get(name, _by_words(name))
    known = _keys(mine) if mine is not None else frozenset()
    a, b = (_raw(c, mine, known) for c in (wanted, target))
    for key in a:
        if key in b and not _same(a[key], b[key]):
            yield key, a[key], b[key], _by_words(key)
        elif key in b:
            yield key, a[key], b[key], ""


def _label(checkpoint: Checkpoint, record: Architecture | None) -> str:
    if record is not None:
        return record.name
    key = "general.architecture" if checkpoint.naming == "gguf" else "model_type"
    return str((checkpoint.metadata if checkpoint.naming == "gguf" else checkpoint.config).get(key))


def _hyper(
    wanted: Checkpoint, target: Checkpoint, mine: Architecture, theirs: Architecture
) -> Iterator[tuple[str, Any, Any]]:
    a, b = hyper_of(wanted, mine), hyper_of(target, theirs)
    if a is None or b is None:
        # the error of the side that is invalid
        side, record = (wanted, mine) if a is None else (target, theirs)
        rows = next((w.shape[0] for n, w in side.items() if "embd" in n or "embed" in n), 0)
        if side.naming == "gguf":
            record.hyper.read_metadata(side.metadata, record.name, vocab=rows, tied=True, file=side.path)
        else:
            record.hyper.read_config(side.config, vocab=rows, file=side.path)
        return
    for name in (f.name for f in fields(Hyper)):
        if name in ("more", "tied"):
            continue
        x, y = getattr(a, name), getattr(b, name)
        if name == "head_dim":
            x, y = a.head_size, b.head_size
        elif name == "rotated":
            x, y = a.rotary_size, b.rotary_size
        elif name == "rope":
            x, y = _rope(a), _rope(b)
        elif name == "windows":
            x, y = _windows(a), _windows(b)
        yield name, x, y
    if wanted.naming != "gguf" and wanted.format == target.format:
        yield "tied", bool(a.tied), bool(b.tied)
    derived = {row.name for row in mine.hyper.keys if not row.config and row.gguf is None}
    more = [(name, a.more.get(name), b.more.get(name)) for name in sorted({*a.more, *b.more} - derived)]
    yield from more
    lost = [r.hyper.gguf_warning(h) if r.hyper.gguf_warning else None for r, h in ((mine, a), (theirs, b))]
    if all(_same(x, y) for _, x, y in more):  # a property that only the warning shows
        yield "property without a key in GGUF", lost[0], lost[1]


def _rope(hyper: Hyper) -> dict[str, Any]:
    """The scaling without entries at their default, and without the base, which has its own field."""
    out = {k: v for k, v in hyper.rope.items() if v is not None and k not in ("rope_theta", "type")}
    return {} if out.get("rope_type") in ("default", "none") else out


def _windows(hyper: Hyper) -> tuple[int, ...]:
    """Windows, without those that cover the context."""
    limited = tuple(0 if w >= hyper.context else w for w in hyper.windows)
    return limited if any(limited) else ()


def _keys(record: Architecture) -> frozenset[str]:
    """Entries of config.json that Hyper covers."""
    own = {key for row in record.hyper.keys for key in row.config}
    return frozenset(own | {"rope_scaling", "rope_parameters", "rope_theta", "tie_word_embeddings"})


def _raw(checkpoint: Checkpoint, record: Architecture | None, known: frozenset[str]) -> dict[str, Any]:
    """The entries that have an effect on inference, by name."""
    if checkpoint.naming == "gguf":
        prefix = f"{checkpoint.metadata.get('general.architecture')}."
        return {k: checkpoint.metadata[k] for k in checkpoint.metadata if k.startswith(prefix)}
    return {k: v for k, v in checkpoint.config.items() if k not in _IGNORED_CONFIG | known and v is not None}


def _by_words(key: str) -> str:
    return next((code for code, words in _WORDS if any(word in key for word in words)), "CER038")


def _same(a: Any, b: Any) -> bool:
    """Equal up to the rounding of float32."""
    if isinstance(a, np.generic):
        a = a.item()
    if isinstance(b, np.generic):
        b = b.item()
    if isinstance(a, bool | int | float) and isinstance(b, bool | int | float):
        return a == b or math.isclose(a, b, rel_tol=_RELATIVE)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return all(_same(a.get(k), b.get(k)) for k in {*a, *b})
    if isinstance(a, str) or isinstance(b, str) or a is None or b is None:
        return bool(a == b)
    if isinstance(a, Sequence | np.ndarray) or isinstance(b, Sequence | np.ndarray):
        x, y = list(a) if _listed(a) else [a], list(b) if _listed(b) else [b]
        if len(x) != len(y) and 1 in (len(x), len(y)):  # one value for all layers
            longest = max(len(x), len(y))
            x, y = (v * longest if len(v) == 1 else v for v in (x, y))
        return len(x) == len(y) and all(_same(p, q) for p, q in zip(x, y, strict=True))
    return bool(a == b)


def _listed(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)


def shown(value: Any) -> str:
    """A value for a message."""
    return printable(value, 80)
