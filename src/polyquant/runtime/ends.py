"""The operations before the first layer and after the last: tokens -> embeddings, hidden states -> logits.

See parts.Ends.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from polyquant.architectures import parts
from polyquant.architectures.hyper import Hyper
from polyquant.errors import InputError
from polyquant.ops.arithmetic import tanh
from polyquant.ops.decoder import add
from polyquant.runtime.linear import Linear
from polyquant.runtime.norm import Norm
from polyquant.types import F32, Weight

__all__ = ["Embedding", "Head", "LayerInputs", "embedding_scale", "logit_scale", "row_lengths"]


class Embedding:
    """Rows of the table, times a scale, plus position embeddings and a constant row, then a norm."""

    def __init__(
        self,
        table: Weight,
        scale: float = 1.0,
        positions: F32 | None = None,
        norm: Norm | None = None,
        every: F32 | None = None,
    ) -> None:
        """positions [context, hidden]; every [hidden]: added to each row."""
        self.table, self.scale, self.positions, self.norm = table, np.float32(scale), positions, norm
        self.every = every
        self._parts = dict(table.parts)  # looked up once: each lookup maps the file again

    def __call__(self, tokens: NDArray[np.int64], start: int, out: F32) -> F32:
        """Write the embeddings of T tokens at positions start ... into out [T, hidden].

        Raises InputError beyond the last position.
        """
        codec, shape = self.table.codec, self.table.shape
        first: dict[int, int] = {}
        for i, token in enumerate(tokens.tolist()):
            if (same := first.setdefault(token, i)) < i:
                out[i] = out[same]
            else:
                codec.dequantize(self._parts, shape, rows=slice(token, token + 1), out=out[i : i + 1])
        if self.scale != 1:
            out *= self.scale
        if self.positions is not None:
            if start + len(tokens) > len(self.positions):
                raise InputError(
                    "the model has no embeddings for these positions", expected=f"at most {len(self.positions)}"
                )
            out += self.positions[start : start + len(tokens)]
        if self.every is not None:
            out += self.every
        if self.norm is not None:
            out[:] = self.norm(out)
        return out


class LayerInputs:
    """Per-layer embeddings of a token, n values for each of L layers.

    (norm(P x / sqrt(hidden)) + sqrt(n) table[token]) / sqrt(2), x the embedding of the token. Source:
    modeling_gemma4.py of transformers. The factors are folded into the norm's weights and the table: norm(x / s) equals
    norm(x) with eps s^2.
    """

    def __init__(self, table: Weight, project: Linear, norm: Norm) -> None:
        """table [vocab, L n]; project: [L n, hidden]; norm: over n values."""
        self.size, (self.width, hidden) = len(norm.weight), project.weights[0].shape
        self.table, self.project = Embedding(table, math.sqrt(self.size / 2)), project
        self.norm = Norm(norm.weight * np.float32(math.sqrt(0.5)), norm.eps * hidden)

    def look(self, tokens: NDArray[np.int64], out: F32) -> F32:
        """Write the rows of the table for T tokens into out [T, L n]."""
        return self.table(tokens, 0, out)

    def __call__(self, x: F32, looked: F32) -> F32:
        """Combine embeddings x [T, hidden] and rows of the table -> [T, L, n]."""
        (projected,) = self.project(x)
        return add(self.norm(projected.reshape(-1, self.size)), looked.reshape(-1, self.size)).reshape(
            len(x), -1, self.size
        )


class Head:
    """Logits: a linear, then divisors, a scale and a softcap, c tanh(logit / c)."""

    def __init__(self, scale: float = 1.0, softcap: float = 0.0, divisors: F32 | None = None) -> None:
        """divisors: [vocab]."""
        self.divisors = divisors
        self.scale, self.softcap = np.float32(scale), np.float32(softcap)

    def __call__(self, linear: Linear, hidden: F32) -> F32:
        """Return the logits: [T, hidden] -> [T, vocab]."""
        (y,) = linear(hidden)
        if self.divisors is not None:
            y = y / self.divisors
        if self.scale != 1:
            y = y * self.scale
        if self.softcap:
            y = np.asarray(self.softcap * tanh(y / self.softcap), np.float32)
        return y


def row_lengths(weight: Weight, *, rows: int = 1024) -> F32:
    """Return the lengths of the rows of a matrix, [N, K] -> [N]; 1 for a zero row."""
    step = rows if weight.codec.row_sliced else weight.shape[0]
    slices = (slice(a, min(a + step, weight.shape[0])) for a in range(0, weight.shape[0], step))
    parts = [weight.dequantize(rows=s) if weight.codec.row_sliced else weight.dequantize() for s in slices]
    lengths = np.concatenate([np.linalg.norm(p.astype(np.float64), axis=1) for p in parts]).astype(np.float32)
    return np.where(lengths > 0, lengths, np.float32(1))


def embedding_scale(ends: parts.Ends, hyper: Hyper) -> float:
    """Return the factor of the embeddings."""
    return math.sqrt(hyper.hidden) if ends.root else hyper.real("embedding_scale", 1.0)


def logit_scale(ends: parts.Ends, hyper: Hyper) -> float:
    """Return the factor of the logits."""
    scale = hyper.real("logit_scale", 1.0)
    return 1.0 / scale if ends.divided else scale
