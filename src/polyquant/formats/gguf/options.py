"""Options for opening and writing GGUF files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from polyquant.errors import PlanError
from polyquant.formats.sizes import shard_bytes as parse_size
from polyquant.options import option

if TYPE_CHECKING:
    from polyquant.capabilities import Tile

__all__ = ["LAYOUTS", "GGUFOpenOptions", "GGUFOptions"]

LAYOUTS = ("i2_s.x86", "i2_s.arm", "i2_s.x4", "trinity.i2_s")
"""Layouts of type 36, which the file does not specify."""


def parse_tile(text: str) -> Tile:
    """Parse three integers: "128,64,32" -> (128, 64, 32). Raises PlanError."""
    numbers = [int(x) for x in text.split(",") if x.isdigit() and len(x) < 6]
    if len(numbers) != 3 or 0 in numbers:
        raise PlanError("not a tile", expected="three integers, e.g. 128,64,32", found=text)
    return numbers[0], numbers[1], numbers[2]


_TILE = "Kernel configuration (BM, BK, bm) of TL1/TL2 tensors, which files do not store; not needed for known models."


@dataclass(frozen=True, slots=True)
class GGUFOpenOptions:
    """Options for opening: properties that the bytes do not show. dialect: the program whose type numbers are used."""

    ternary_layout: str | None = option(
        help="Layout of ternary weights in a GGUF file, which does not specify it.", choices=LAYOUTS, shown="i2_s.x86"
    )
    dialect: str | None = option(help="Program whose type numbers the file uses.", flag="")
    tile: Tile | None = option(help=_TILE, metavar="BM,BK,bm", parse=parse_tile)


@dataclass(frozen=True, slots=True)
class GGUFOptions:
    """Options for writing."""

    architecture: str | None = option(help="GGUF architecture name, if a model has two (bitnet).", metavar="NAME")
    pre_tokenizer: str | None = option(
        help="llama.cpp's name of the pre-tokenizer, instead of the one that matches tokenizer.json.",
        metavar="NAME",
        shown="detected",
    )
    tile: Tile | None = option(help=_TILE, metavar="BM,BK,bm", parse=parse_tile)
    shard_bytes: int | None = option(
        help="Split the model into files of at most this size.", flag="--shard-size", metavar="SIZE", parse=parse_size,
        shown="one file",
    )  # fmt: skip
