"""One file per family of codecs. A codec knows arrays, never files."""

from polyquant.callable_package import make_callable

make_callable(__name__, "polyquant.analysis.catalogue:codecs")
