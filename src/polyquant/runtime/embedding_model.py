"""A loaded encoder. It is a Model, so functions that require a decoder report that this one does not generate text."""

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
    """A checkpoint with its encoder.

    `embed` and `states` are supported; operations that need a decoder raise UnsupportedError.
    """

    def __init__(
        self, checkpoint: Checkpoint, architecture: Architecture, encoder: Encoder, *, context: int | None = None
    ) -> None:
        super().__init__(checkpoint, architecture, None, context=context)
        self.encoder = encoder

    @property
    def hyper(self) -> Hyper:
        """Its hyper-parameters."""
        return self.encoder.hyper

    @property
    def decoder(self) -> Decoder:
        """Raises UnsupportedError: an encoder has no decoder."""
        raise UnsupportedError(
            f"'{self.architecture.name}' is an encoder: it produces embeddings and generates no text",
            file=self.checkpoint.path,
            hint="polyquant embed, or load(...).embed([...])",
        )

    def states(self, tokens: Sequence[int] | NDArray[np.integer]) -> F32:
        """See Model."""
        return self.encoder.hidden(token_ids(tokens, self.vocab, self.context))
