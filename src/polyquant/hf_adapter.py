"""Alias of polyquant.hf, under the name used in the Trellis v3 specification."""

from polyquant.integrations.transformers.load import load_trellis_model

__all__ = ["load_trellis_model"]
