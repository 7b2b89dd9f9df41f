"""Codecs, one file per family. A codec works on arrays and never touches files. `polyquant.codecs()` lists them."""

from polyquant.callable_package import make_callable

make_callable(__name__, "polyquant.analysis.catalogue:codecs")
