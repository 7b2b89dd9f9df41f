"""Hugging Face folders: safetensors (one file or shards), pytorch_model.bin, packed BitNet, and the JSON beside them."""

from polyquant.formats.huggingface.check import check
from polyquant.formats.huggingface.codes import CODES
from polyquant.formats.huggingface.folder import own_files
from polyquant.formats.huggingface.layout import lay_out
from polyquant.formats.huggingface.open import open, sniff

__all__ = ["CODES", "check", "lay_out", "name", "open", "own_files", "sniff"]

name = "hf"
