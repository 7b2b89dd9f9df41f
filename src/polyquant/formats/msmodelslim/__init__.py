"""msModelSlim (Ascend): folders of int8 and int4 weights with a description of the type of every tensor, in three dialects."""

from polyquant.formats.msmodelslim.check import check
from polyquant.formats.msmodelslim.codes import CODES
from polyquant.formats.msmodelslim.consumers import check_target
from polyquant.formats.msmodelslim.folder import own_files
from polyquant.formats.msmodelslim.layout import lay_out
from polyquant.formats.msmodelslim.open import open, sniff

__all__ = ["CODES", "check", "check_target", "lay_out", "name", "open", "own_files", "sniff"]

name = "msmodelslim"
