"""A loaded encoder: vectors of texts. It is a Model, so that whatever takes one says by itself that this one writes no text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyquant.architectures.hyper import Hyper
from polyquant.architectures.record import Architecture
from polyquant.errors import UnsupportedError
from polyquant.runtime.decoder import Decoder
from polyquant.runtime.encoder import Encoder
from polyquant.runtime.model import Model
from polyquant.runtime.session import token_ids
from polyquant.types import F32, Checkpoint

__all__ = ["EncoderModel"]


class EncoderModel(Model):
    """A checkpoint with its encoder. `embed` and `states` are what it does; what needs a decoder raises UnsupportedError."""

    def __init__(
        self, checkpoint: Checkpoint, architecture: Architecture, encoder: Encoder, *, context: int | None = None
    ) -> None:
        super().__init__(checkpoint, architecture, None, context=context)
        self.encoder = encoder

    @property
    def hyper(self) -> Hyper:
        """Its sizes."""
        return self.encoder.hyper

    @property
    def decoder(self) -> Decoder:
        """Raises UnsupportedError: there is none."""
        raise UnsupportedError(
            f"'{self.architecture.name}' is an encoder: it gives embeddings and writes no text",
            file=self.checkpoint.path,
            hint="polyquant embed, or load(...).embed(texts)",
        )

    def states(self, tokens: Sequence[int] | NDArray[np.integer]) -> F32:
        """See Model."""
        return self.encoder.hidden(token_ids(tokens, self.vocab, self.context))
