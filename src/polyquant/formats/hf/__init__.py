"""Hugging Face folders: safetensors (one file or shards), pytorch_model.bin, packed BitNet, and the JSON beside them."""

from polyquant.formats.hf.check import check
from polyquant.formats.hf.codes import CODES
from polyquant.formats.hf.folder import own_files
from polyquant.formats.hf.layout import lay_out
from polyquant.formats.hf.open import open, sniff

__all__ = ["CODES", "check", "lay_out", "name", "open", "own_files", "sniff"]

name = "hf"
