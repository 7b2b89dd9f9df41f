"""Reject trellis weights that config.json does not declare, as in folders of other programs.

transformers would not find the expected weights, and would initialize the layers randomly and only log it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from polyquant.errors import UnsupportedError
from polyquant.formats.trellis.open import sniff

__all__ = ["refuse_undeclared"]


def refuse_undeclared() -> None:
    """Make `from_pretrained` of all models raise UnsupportedError for such files, before it loads anything."""
    PreTrainedModel._load_pretrained_model = staticmethod(_checked(PreTrainedModel._load_pretrained_model))


def _checked(load: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(load)
    def checked(
        model: Any,
        state_dict: Any,
        checkpoint_files: Sequence[str] | None,
        load_config: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        if load_config.hf_quantizer is None:
            _refuse(checkpoint_files or ())
        return load(model, state_dict, checkpoint_files, load_config, *args, **options)

    return checked


def _refuse(files: Sequence[str]) -> None:
    """Raise UnsupportedError if one of the weight files contains trellis components."""
    for file in map(Path, files):
        if sniff(file) is not None:
            raise UnsupportedError(
                "config.json does not declare these trellis weights: transformers would initialize the layers randomly",
                file=file,
                hint="load the folder with polyquant.hf.load_trellis_model, or rewrite it with polyquant convert",
            )
