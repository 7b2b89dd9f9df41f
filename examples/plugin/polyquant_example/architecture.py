"""The architecture `example`: attention and feed-forward read the same input, and their sum is scaled.

    y = x + s (O attention(rope(Q norm1(x)), rope(K norm1(x)), V norm1(x)) + D (silu(G norm2(x)) * U norm2(x)))

s is an extra hyper-parameter; q, k and v are one matrix; RoPE covers half of each head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, FeedForward, Layer
from polyquant.architectures.record import Architecture, Bias
from polyquant.ops.decoder import add
from polyquant.runtime.kv_cache import KVCache
from polyquant.runtime.layer import SequentialLayer
from polyquant.runtime.rotary import Rotation
from polyquant.types import F32

__all__ = ["RECORD", "ParallelLayer"]


@dataclass(frozen=True, slots=True)
class Parallel(Layer):
    """A layer whose parts run in parallel."""

    runtime: ClassVar[str] = "polyquant_example.architecture:ParallelLayer"


class ParallelLayer(SequentialLayer):
    """Compute the formula above. The sum is scaled in numpy, so the step cannot be recorded."""

    recordable = False

    def __init__(self, layer: Layer, site: Any) -> None:
        super().__init__(layer, site)
        self.scale = np.float32(site.hyper.more["residual_scale"])

    def __call__(self, x: F32, rotations: Sequence[Rotation], cache: KVCache) -> F32:
        """float32 [tokens, hidden] -> the same shape."""
        return x + self.scale * add(self.attention(x, rotations, cache), self.feed_forward(x))


_TABLE = USUAL.changed(layers={"config": ("n_layer",)}, hidden={"config": ("n_embd",)}, rotated={"default": 0.5})
RECORD = Architecture(
    name="example",
    model_type="example",
    class_name="ExampleForCausalLM",
    reads=("example",),
    names=NameTable(
        {
            "ln_1": "attn_norm",
            "attention.query_key_value": "attn_qkv",
            "attention.dense": "attn_output",
            "ln_2": "ffn_norm",
            "mlp.w_gate": "ffn_gate",
            "mlp.w_up": "ffn_up",
            "mlp.w_down": "ffn_down",
        },
        top={"decoder.embed": "token_embd", "decoder.ln_f": "output_norm", "head": "output"},
        prefix="decoder.blocks.",
    ),
    hyper=replace(
        _TABLE,
        keys=(*_TABLE.keys, Key("residual_scale", ("residual_scale",), "residual_scale", default=0.7, kind="real")),
        written={"partial_rotary_factor": 0.5},
    ),
    layer=Parallel(Attention(fused=True), FeedForward()),
    pairs=True,
    biases=(Bias(("attn_qkv",), "use_bias"),),
)
