"""Trellis v2 and v3: folders of trellis-coded weights, in the document's form and in every dialect of Metal Marlin."""

from polyquant.formats.trellis.check import check
from polyquant.formats.trellis.codes import CODES
from polyquant.formats.trellis.folder import own_files
from polyquant.formats.trellis.layout import lay_out
from polyquant.formats.trellis.open import open, sniff

__all__ = ["CODES", "check", "lay_out", "name", "open", "own_files", "sniff"]

name = "trellis-v3"
