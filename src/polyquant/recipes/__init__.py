"""Recipes: named mixes and rules that choose each tensor's codec. `polyquant.recipes()` lists them."""

from polyquant.callable_package import make_callable

make_callable(__name__, "polyquant.analysis.catalogue:recipes")
