"""Trellis v3 folders (and v2): quantized weights in tiles, beside config.json and tokenizer of a Hugging Face model."""

from polyquant.formats.trellis.layout import lay_out

__all__ = ["lay_out", "name"]

name = "trellis-v3"
