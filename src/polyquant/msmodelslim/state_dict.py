"""Conversion of state dicts with numpy arrays or torch tensors, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError

__all__ = ["arrays_of"]


def arrays_of(weights: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return name -> array. Raises InputError for values that are neither arrays nor tensors."""
    return {name: _array(name, value) for name, value in weights.items()}


def _array(name: str, value: Any) -> NDArray[Any]:
    """Return a value as an array, bfloat16 as ml_dtypes' dtype. Raises InputError if it is not an array or tensor."""
    if isinstance(value, np.ndarray):
        return value
    if not (hasattr(value, "detach") and hasattr(value, "dtype")):
        raise InputError("a state dict must contain arrays or tensors", tensor=name, found=type(value).__name__)
    tensor = value.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        return np.asarray(tensor.float().numpy().astype(ml_dtypes.bfloat16))
    return np.asarray(tensor.numpy())
