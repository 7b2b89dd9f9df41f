"""An architecture that an installed package provides: one record, and a kind of layer that polyquant does not have.

Attention and feed-forward read the same input: y = x + s (attention(x) + feed_forward(x)), each after a separate norm;
q, k and v in one matrix; s is an additional hyperparameter. The first layer is wider than the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, FeedForward, Layer
from polyquant.architectures.record import Architecture, Bias
from polyquant.ops.decoder import add
from polyquant.runtime.layer import SequentialLayer


@dataclass(frozen=True, slots=True)
class Parallel(Layer):
    """A layer with parallel parts."""

    runtime: ClassVar[str] = "outside_architecture:ParallelLayer"


@dataclass(frozen=True, slots=True)
class WideFirst(FeedForward):
    """Twice as wide in the first layer."""

    def shapes(self, hyper, index):
        wide = hyper.feed_forward * (1 if index else 2)
        return FeedForward.shapes(self, replace(hyper, feed_forward=wide), index)


class ParallelLayer(SequentialLayer):
    """Compute the layer of the record. The sum is scaled in numpy, so the step cannot be recorded."""

    recordable = False

    def __init__(self, layer, site):
        super().__init__(layer, site)
        self.scale = np.float32(site.hyper.more["residual_scale"])

    def __call__(self, x, rotations, cache):
        return x + self.scale * add(self.attention(x, rotations, cache), self.feed_forward(x))


TABLE = USUAL.changed(layers={"config": ("n_layer",)}, hidden={"config": ("n_embd",)}, rotated={"default": 0.5})
OUTSIDE = Architecture(
    name="outside",
    model_type="outside_model",
    class_name="OutsideForCausalLM",
    reads=("outside_model",),
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
        TABLE,
        keys=(*TABLE.keys, Key("residual_scale", ("residual_scale",), "residual_scale", default=0.7, kind="real")),
        written={"partial_rotary_factor": 0.5},
    ),
    layer=Parallel(Attention(fused=True), WideFirst()),
    pairs=True,
    biases=(Bias(("attn_qkv",), "use_bias"),),
)
