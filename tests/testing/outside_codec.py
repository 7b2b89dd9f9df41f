"""An external package with codecs: blocks of 16 bytes and a step, rounded or searched; trellis with a new search."""

from dataclasses import replace
from functools import partial

import numpy as np

from polyquant.codecs.blocks import BlockCodec
from polyquant.codecs.trellis import Trellis
from polyquant.errors import UnknownNameError
from polyquant.registry import Search
from polyquant.types import TrellisCodes

__all__ = ["ROUNDED", "SEARCHED", "TRELLIS", "named", "nearest_step", "zeros"]


def decode(b):
    """[n, 20] -> [n, 16]: a float32 step and codes around 128."""
    step = b[:, :4].copy().view("<f4")
    return (b[:, 4:].astype(np.float32) - 128) * step


def rounded(w, importance, *, most=127):
    """[n, 16] -> [n, 20]: the largest falls on `most`."""
    step = np.abs(w).max(1, keepdims=True) / np.float32(most)
    codes = np.rint(np.divide(w, step, out=np.zeros_like(w), where=step != 0)) + 128
    return np.hstack([step.astype("<f4").view(np.uint8), codes.astype(np.uint8)])


def nearest_step(w, importance):
    """The same with the step of least squared error among a few."""
    tried = [(rounded(w * s, importance), s) for s in (np.float32(1), np.float32(0.99), np.float32(0.98))]
    best, least = None, None
    for blocks, s in tried:
        blocks = np.hstack([(blocks[:, :4].copy().view("<f4") / s).astype("<f4").view(np.uint8), blocks[:, 4:]])
        error = np.square(decode(blocks) - w).sum(1)
        better = np.full(len(w), True) if least is None else error < least
        best = blocks if best is None else np.where(better[:, None], blocks, best)
        least = error if least is None else np.where(better, error, least)
    return best


def zeros(codec, w, *, importance, hessian, book):
    """Codes of zero: what a trellis search may not do, but a codec cannot know."""
    n, k = w.shape
    codes = np.zeros((-(-k // 16), -(-n // 16), 256), np.uint8)
    scales = np.zeros((codec.group_count((n, k)), n), np.float32)
    return TrellisCodes(codec.code((n, k)), codes, scales, np.ones(k, np.float32), np.ones(n, np.float32))


ROUNDED = BlockCodec("outside.rounded", -1, 16, 20, decode, rounded, fields=((0, 4, 1),))
SEARCHED = BlockCodec("outside.searched", -1, 16, 20, decode, Search("outside_codec:nearest_step"), fields=((0, 4, 1),))
TRELLIS = replace(Trellis(3), search=zeros)


def named(name):
    """family.B: B bits are used of each code."""
    bits = name.partition(".")[2]
    if bits not in ("3", "5"):
        raise UnknownNameError("codec", name, ["family.3", "family.5"])
    return BlockCodec(name, -1, 16, 20, decode, partial(rounded, most=2 ** (int(bits) - 1)), fields=((0, 4, 1),))
