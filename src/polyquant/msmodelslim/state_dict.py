"""State dicts as they come: numpy arrays, or tensors of torch, which is not imported for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError

__all__ = ["arrays_of"]


def arrays_of(weights: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Name -> array. Raises InputError for what is neither an array nor a tensor."""
    return {name: _array(name, value) for name, value in weights.items()}


def _array(name: str, value: Any) -> NDArray[Any]:
    """A tensor's numbers, bfloat16 as ml_dtypes' type. Raises InputError for what has none."""
    if isinstance(value, np.ndarray):
        return value
    if not (hasattr(value, "detach") and hasattr(value, "dtype")):
        raise InputError("a state dict holds arrays or tensors", tensor=name, found=type(value).__name__)
    tensor = value.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        return np.asarray(tensor.float().numpy().astype(ml_dtypes.bfloat16))
    return np.asarray(tensor.numpy())
