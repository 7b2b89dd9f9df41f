"""Which codec each tensor gets: mixes by name and rules."""

from polyquant.callable_package import make_callable

make_callable(__name__, "polyquant.analysis.catalogue:recipes")
