"""The language model inside a multimodal folder (Gemma 3 and 4, Llama 4, Qwen3.5, Mistral 3), configured by
`text_config`.

Its tensors start with `language_model.` or `model.language_model.` (see names.py); towers and projectors have other
names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyquant.architectures.find import of_config
from polyquant.architectures.names import NESTED
from polyquant.types import Checkpoint

__all__ = ["language_model"]

_SHARED = (
    "tie_word_embeddings",
    "quantization_config",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
)
"""Entries outside text_config that also apply to the language model."""


def language_model(checkpoint: Checkpoint) -> Checkpoint:
    """Return the language model's tensors and configuration, with a note about omitted tensors.

    Returns the checkpoint itself if it holds only a language model.
    """
    config = _nested(checkpoint.config) if checkpoint.naming == "hf" else None
    if config is None or of_config(config) is None:
        return checkpoint
    inside = {n: w for n, w in checkpoint.weights.items() if n.startswith((*NESTED, "lm_head."))}
    if not any(name.startswith(NESTED) for name in inside):
        inside = dict(checkpoint.weights)  # some are saved without their towers, under plain names
    skipped = next((name for name in checkpoint if name not in inside), None)
    notes = checkpoint.notes
    if skipped is not None:
        count = len(checkpoint) - len(inside)
        notes += (f"{count} tensors are not part of the language model and are skipped (first: {skipped})",)
    return replace(checkpoint, weights=inside, config=config, notes=notes)


def _nested(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the nested configuration of the language model, None if there is none."""
    text = config.get("text_config")
    if not isinstance(text, Mapping) or "num_hidden_layers" not in text or "num_hidden_layers" in config:
        return None
    return {**{key: config[key] for key in _SHARED if key in config}, **text}
