"""GGUF, the format of llama.cpp: everything reads from here.

Byte diagram and sources: header.py (the file), values.py (metadata), dialect.py (type numbers), codes.py (what findings mean).
"""

from polyquant.formats.gguf.check import check
from polyquant.formats.gguf.codes import CODES
from polyquant.formats.gguf.dialect import DIALECTS
from polyquant.formats.gguf.edit import Edited, edit
from polyquant.formats.gguf.header import Metadata
from polyquant.formats.gguf.layout import lay_out
from polyquant.formats.gguf.reading import LAYOUTS, sniff
from polyquant.formats.gguf.reading import open_gguf as open
from polyquant.formats.gguf.settings import KINDS, parse_setting
from polyquant.formats.gguf.values import NumberArray, StringArray, plain

__all__ = [
    "CODES", "DIALECTS", "KINDS", "LAYOUTS", "Edited", "Metadata", "NumberArray", "StringArray",
    "check", "edit", "lay_out", "name", "open", "parse_setting", "plain", "sniff",
]  # fmt: skip

name = "gguf"
