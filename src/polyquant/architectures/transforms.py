"""What a tensor's values go through on the way from a Hugging Face folder to GGUF, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from polyquant.architectures.hyper import Hyper
from polyquant.errors import InputError
from polyquant.types import Shape

__all__ = ["PairedRows"]


@dataclass(frozen=True, slots=True)
class PairedRows:
    """llama.cpp rotates pairs (2i, 2i + 1) where transformers rotates (i, i + d/2): within each head, row 2i + j comes from row j d/2 + i.

    heads: the field of Hyper that counts them.
    """

    heads: Literal["heads", "kv_heads"]

    def rows(self, hyper: Hyper, shape: Shape, name: str, file: object) -> NDArray[np.int64]:
        """Gather of source rows [N], towards GGUF. Raises InputError for a tensor with another number of rows."""
        heads: int = getattr(hyper, self.heads)
        size = heads * hyper.head_size
        if not shape or shape[0] != size:
            raise InputError(
                "rows do not fit the heads of the configuration", file=file, tensor=name, expected=size, found=shape
            )
        order = np.arange(size, dtype=np.int64).reshape(heads, 2, hyper.head_size // 2)
        return np.ascontiguousarray(order.swapaxes(1, 2)).reshape(-1)
