"""Parts of encoders: layers whose norms stand behind the sums, and attention that has no norm before it in the first layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polyquant.architectures.hyper import Hyper
from polyquant.architectures.parts import Attention, Feed, Layer
from polyquant.types import Shape

__all__ = ["LaterNorm", "PostNormLayer"]


@dataclass(frozen=True, slots=True)
class PostNormLayer(Layer):
    """h = norm(x + attention(x));  y = norm(h + feed_forward(h)) (Vaswani et al. 2017): attn_output_norm, layer_output_norm. What the matrices read goes
    on beside them too, so the parts have no norms of their own."""

    runtime: ClassVar[str] = "polyquant.runtime.encoder:PostNormLayer"

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """Of both parts, each with the norm behind it."""
        norm = (hyper.hidden,)
        attention, feed_forward = (part.shapes(hyper, index) for part in self.parts)
        return {**attention, "attn_output_norm": norm, **feed_forward, "layer_output_norm": norm}


@dataclass(frozen=True, slots=True)
class LaterNorm(Attention):
    """Attention whose norm the first layer does not have: the norm of the embeddings stands there already."""

    runtime: ClassVar[str] = "polyquant.runtime.encoder:LaterNorm"

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """See Part. The norm is not in every layer, so that nothing may be moved into it."""
        return self.at(0).feeds

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See Part."""
        return self.at(index).shapes(hyper, index)

    def at(self, index: int) -> Attention:
        """The attention of layer `index`."""
        return Attention(fused=self.fused, norm=self.norm if index else "")
