"""Parts of encoders: post-norm layers, and attention that has no norm in the first layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polyquant.architectures.hyper import Hyper
from polyquant.architectures.parts import Attention, Feed, Layer
from polyquant.types import Shape

__all__ = ["LaterNorm", "PostNormLayer"]


@dataclass(frozen=True, slots=True)
class PostNormLayer(Layer):
    """h = norm(x + attention(x));  y = norm(h + feed_forward(h)) (Vaswani et al. 2017).

    The norms are attn_output_norm and layer_output_norm. The residual stream is also what the matrices read, so the
    parts have no separate norms.
    """

    runtime: ClassVar[str] = "polyquant.runtime.encoder:PostNormLayer"

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """Return the tensors of both parts, each followed by its norm."""
        norm = (hyper.hidden,)
        attention, feed_forward = (part.shapes(hyper, index) for part in self.parts)
        return {**attention, "attn_output_norm": norm, **feed_forward, "layer_output_norm": norm}


@dataclass(frozen=True, slots=True)
class LaterNorm(Attention):
    """Attention without a norm in the first layer, where the embedding norm has already been applied."""

    runtime: ClassVar[str] = "polyquant.runtime.encoder:LaterNorm"

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """See Part. Layer 0 lacks the norm, so nothing may be folded into it."""
        return self.at(0).feeds

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See Part."""
        return self.at(index).shapes(hyper, index)

    def at(self, index: int) -> Attention:
        """Return the attention of layer `index`."""
        return Attention(fused=self.fused, norm=self.norm if index else "")
