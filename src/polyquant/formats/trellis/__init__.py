"""Trellis v3 folders (and v2): quantized weights in tiles, beside config.json and tokenizer of a Hugging Face model."""

from polyquant.formats.trellis.layout import lay_out

__all__ = ["CODES", "lay_out", "name", "sniff"]

name = "trellis-v3"
CODES: dict[str, str] = {}


def sniff(path: object) -> None:
    """Nothing."""
