"""Latent attention (MLA, DeepSeek-AI 2024) as a part of a layer (parts.py). The diagram is in runtime/latent.py.

GGUF stacks the two per-head matrices applied to c: K_b transposed, [heads, kv_lora, nope], and V_b, [heads, value,
kv_lora].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from polyquant.architectures.hyper import Hyper
from polyquant.architectures.moves import Make, Move
from polyquant.architectures.parts import Feed
from polyquant.operations import Operation, Reshape, Slice, Transpose, chain
from polyquant.types import Shape

__all__ = ["KV_B", "LatentAttention"]


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Latent attention; queries come from one matrix, or from two with a norm between them if Hyper's q_lora is not
    0."""

    runtime: ClassVar[str] = "polyquant.runtime.latent:LatentAttention"

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """See parts.Part.

        Folders store both matrices applied to c as one, so its norm cannot be scaled for one of them alone.
        """
        return (
            Feed("attn_norm", ("attn_q", "attn_q_a", "attn_kv_a_mqa"), "norm"),
            Feed("attn_q_a_norm", ("attn_q_b",), "norm"),
            Feed("attn_kv_a_mqa", ("attn_k_b", "attn_v_b"), "activation"),
            Feed("attn_v_b", ("attn_output",), "activation"),
        )

    def inputs(self, hyper: Hyper) -> tuple[str, str]:
        """Return the matrices that read the layer's input."""
        return "attn_q_a" if hyper.count("q_lora") else "attn_q", "attn_kv_a_mqa"

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See parts.Part."""
        heads, hidden, rope = hyper.heads, hyper.hidden, hyper.head_size
        q_lora, lora, nope, value = (hyper.count(name) for name in ("q_lora", "kv_lora", "nope_head", "value_head"))
        wide = heads * (nope + rope)
        out: dict[str, Shape] = {"attn_norm": (hidden,)}
        if q_lora:
            out |= {"attn_q_a": (q_lora, hidden), "attn_q_a_norm": (q_lora,), "attn_q_b": (wide, q_lora)}
        else:
            out["attn_q"] = (wide, hidden)
        return out | {
            "attn_kv_a_mqa": (lora + rope, hidden),
            "attn_kv_a_norm": (lora,),
            "attn_k_b": (heads, lora, nope),
            "attn_v_b": (heads, value, lora),
            "attn_output": (hidden, heads * value),
        }


def _of_heads(start: Callable[[Hyper], int], stop: Callable[[Hyper], int], *after: Operation) -> Make:
    """Return rows [start, stop) of each head of kv_b_proj [heads * (nope + value), kv_lora]."""

    def make(hyper: Hyper, shape: Shape) -> Operation:
        each = hyper.count("nope_head") + hyper.count("value_head")
        return chain(Reshape((hyper.heads, each, shape[-1])), Slice(start(hyper), stop(hyper), axis=1), *after)

    return make


def _both(hyper: Hyper, shapes: Sequence[Shape]) -> Shape:
    (heads, lora, nope), (_, value, _) = shapes
    return heads * (nope + value), lora


KV_B = Move(
    "self_attn.kv_b_proj.weight",
    {
        "attn_k_b.weight": _of_heads(lambda h: 0, lambda h: h.count("nope_head"), Transpose()),
        "attn_v_b.weight": _of_heads(
            lambda h: h.count("nope_head"), lambda h: h.count("nope_head") + h.count("value_head")
        ),
    },
    _both,
)
