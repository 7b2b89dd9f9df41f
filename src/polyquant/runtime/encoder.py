"""An encoder: embedding, layers, optionally a final norm. Attention is bidirectional; there is no cache and no head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyquant.architectures import bidirectional
from polyquant.architectures.hyper import Hyper
from polyquant.errors import UnsupportedError
from polyquant.ops.decoder import PLAIN, Scores, add
from polyquant.ops.encoder import attend_bidirectional
from polyquant.runtime.attention import Attention, Keys
from polyquant.runtime.ends import Embedding
from polyquant.runtime.layer import SequentialLayer
from polyquant.runtime.norm import Norm
from polyquant.runtime.rotary import Rotary, Rotation, rotations_at
from polyquant.runtime.site import Site
from polyquant.types import F32

__all__ = ["Bidirectional", "Encoder", "LaterNorm", "PostNormLayer"]


class Bidirectional:
    """Bidirectional attention over the current input. See attention.Keys."""

    def attend(
        self, layer: int, q: F32, k: F32, v: F32, *, scale: float, window: int = 0, scores: Scores = PLAIN
    ) -> F32:
        """Attend with q [T, H, D] to k, v [T, G, D] -> [T, H, D].

        Raises UnsupportedError for scores other than a plain softmax.
        """
        if scores.softcap or scores.slopes is not None or scores.sinks is not None:
            raise UnsupportedError("softcap, ALiBi and sinks are not supported in an encoder")
        return attend_bidirectional(q, k, v, scale=scale, window=window)


class LaterNorm(Attention):
    """Attention without a norm in the first layer."""

    def __init__(self, part: bidirectional.LaterNorm, site: Site) -> None:
        super().__init__(part.at(site.index), site)


class PostNormLayer(SequentialLayer):
    """h = norm(x + attention(x));  y = norm(h + feed_forward(h))."""

    def __init__(self, layer: bidirectional.PostNormLayer, site: Site) -> None:
        super().__init__(layer, site)
        self.attention_norm, self.norm = site.norm("attn_output_norm"), site.norm("layer_output_norm")

    def __call__(self, x: F32, rotations: Sequence[Rotation], cache: Keys) -> F32:
        """See decoder.Layer."""
        h = self.attention_norm(add(x, self.attention(x, rotations, cache)))
        return self.norm(add(h, self.feed_forward(h)))


class Encoder:
    """tokens -> hidden states."""

    def __init__(
        self,
        hyper: Hyper,
        embedding: Embedding,
        layers: Sequence[SequentialLayer],
        norm: Norm | None,
        rotaries: Sequence[Rotary],
    ) -> None:
        """norm: the final norm, if any."""
        self.hyper, self.embed, self.layers = hyper, embedding, tuple(layers)
        self.norm, self.rotaries = norm, tuple(rotaries)

    def hidden(self, tokens: NDArray[np.int64]) -> F32:
        """Return the states [T, hidden] of T tokens."""
        count, attention = len(tokens), Bidirectional()
        rotations = rotations_at(self.rotaries, 0, count, count)
        x = self.embed(tokens, 0, np.empty((count, self.hyper.hidden), np.float32))
        for layer in self.layers:
            x = layer(x, rotations, attention)
        return x if self.norm is None else self.norm(x)
