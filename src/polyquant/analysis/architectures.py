"""The known model architectures with installed packages, for `polyquant architectures` and docs/architectures.md."""

from __future__ import annotations

from dataclasses import dataclass

from polyquant import registry
from polyquant.architectures.record import Architecture
from polyquant.architectures.windows import no_windows

__all__ = ["Known", "known_architectures"]

_OF_KEYS = {
    "experts": "experts",
    "shared_feed_forward": "shared expert",
    "shared_experts": "shared expert",
    "kv_lora": "latent attention",
    "ssm_conv": "state space",
    "short_conv": "short convolutions",
    "attention_softcap": "soft caps",
    "window": "sliding windows",
}
"""Hyper-parameter -> the trait that it implies."""


@dataclass(frozen=True, slots=True)
class Known:
    """One architecture.

    name: general.architecture of GGUF; model_type, class_name: from config.json; runs: False if it can only be
    converted.
    """

    name: str
    model_type: str
    class_name: str
    runs: bool
    traits: tuple[str, ...]


def known_architectures() -> tuple[Known, ...]:
    """All architectures, sorted by Hugging Face class name."""
    ours = reversed(registry.architectures())  # the first record of a name is the most complete
    records = {(r.class_name, r.name): r for r in (*registry.installed_architectures(), *ours)}
    return tuple(
        Known(r.name, r.model_type, r.class_name, r.runs, _traits(r))
        for r in sorted(records.values(), key=lambda r: (r.class_name.lower(), r.name))
    )


def _traits(record: Architecture) -> tuple[str, ...]:
    keys = {key.name for key in record.hyper.keys}
    stems = {name.removesuffix(".weight") for move in record.moves for name in move.targets} | set(
        record.names.layer.values()
    )
    traits = [trait for name, trait in _OF_KEYS.items() if name in keys]
    traits += ["sliding windows"] if record.hyper.windows is not no_windows else []
    traits += ["fused q, k, v"] if "attn_qkv" in stems and "ssm_conv" not in keys else []
    traits += ["embeddings"] if record.encoder else []
    traits += ["ternary"] if record.ternary is not None else []
    return tuple(dict.fromkeys(traits))
