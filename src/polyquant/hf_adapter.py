"""The name that the Trellis v3 document gives to the way into transformers; the same as polyquant.hf."""

from polyquant.integrations.transformers.load import load_trellis_model

__all__ = ["load_trellis_model"]
