"""The two files of msModelSlim: weights, and the description of their types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.dtypes import BY_NUMPY
from polyquant.errors import InputError
from polyquant.formats.existing import refuse_target
from polyquant.storage.safetensors import header_bytes
from polyquant.storage.staging import staged
from polyquant.types import ArraySpec, FilePlan, Layout, Slot

__all__ = ["write_pair"]


def write_pair(target: Path, weights: Mapping[str, NDArray[Any]], description: Mapping[str, str], word: str) -> None:
    """Write quant_model_weight_WORD.safetensors and quant_model_description_WORD.json to a new folder.

    Raises PlanError, InputError, OSError.
    """
    refuse_target(target, None, overwrite=False)
    if strange := [n for n, a in weights.items() if a.dtype not in BY_NUMPY]:
        raise InputError("dtype not supported by safetensors", tensor=strange[0], found=str(weights[strange[0]].dtype))
    file = f"quant_model_weight_{word}.safetensors"
    header, entries = header_bytes([(n, BY_NUMPY[a.dtype], a.shape) for n, a in weights.items()], {})
    slots = {(e.name, "blocks"): Slot(file, e.offset, ArraySpec(e.shape, weights[e.name].dtype)) for e in entries}
    text = json.dumps(description, indent=2, ensure_ascii=False).encode()
    files = (
        FilePlan(file, len(header) + sum(e.nbytes for e in entries), ((0, header),)),
        FilePlan(f"quant_model_description_{word}.json", len(text), ((0, text),)),
    )
    with staged(target, Layout(files, slots, folder=True), "", resume="never") as staging:
        for name, array in weights.items():
            staging.write(name, "blocks", 0, np.ascontiguousarray(array))
