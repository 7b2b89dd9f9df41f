"""What can be said of a GGUF file, and asked of one."""

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
"""What type 36 means; no byte of a file tells."""


def parse_tile(text: str) -> Tile:
    """Three numbers: "128,64,32" -> (128, 64, 32). Raises PlanError."""
    numbers = [int(x) for x in text.split(",") if x.isdigit() and len(x) < 6]
    if len(numbers) != 3 or 0 in numbers:
        raise PlanError("not a tile", expected="three numbers, e.g. 128,64,32", found=text)
    return numbers[0], numbers[1], numbers[2]


_TILE = "Kernel configuration (BM, BK, bm) of TL1/TL2 tensors, which no file holds; known models need none."


@dataclass(frozen=True, slots=True)
class GGUFOpenOptions:
    """Of a file whose bytes do not tell everything. dialect: the program whose type numbers it has."""

    ternary_layout: str | None = option(
        help="How the ternary bytes of a GGUF lie; the file cannot tell.", choices=LAYOUTS, shown="i2_s.x86"
    )
    dialect: str | None = option(help="Program whose type numbers the file has.", flag="")
    tile: Tile | None = option(help=_TILE, metavar="BM,BK,bm", parse=parse_tile)


@dataclass(frozen=True, slots=True)
class GGUFOptions:
    """Of a file to be written."""

    architecture: str | None = option(
        help="GGUF architecture to write where a model has two names (bitnet).", metavar="NAME"
    )
    pre_tokenizer: str | None = option(
        help="llama.cpp's name for how text is cut into words, instead of the one that cuts as tokenizer.json does.",
        metavar="NAME",
        shown="found by what it does",
    )
    tile: Tile | None = option(help=_TILE, metavar="BM,BK,bm", parse=parse_tile)
    shard_bytes: int | None = option(
        help="Split the model into files of at most this size.", flag="--shard-size", metavar="SIZE", parse=parse_size,
        shown="one file",
    )  # fmt: skip
