"""Formats, one package each, with two protocols: `protocol.Format` (sniff, open, check) and `protocol.Target` (choose,
prepare, lay out). `polyquant.formats()` lists them.
"""

from polyquant.callable_package import make_callable

make_callable(__name__, "polyquant.analysis.catalogue:formats")
