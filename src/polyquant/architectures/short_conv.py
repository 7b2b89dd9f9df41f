"""The gated short convolution of LFM2 (Liquid AI 2025) as a part of a layer (parts.py).

The diagram is in runtime/short_conv.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polyquant.architectures.hyper import Hyper
from polyquant.architectures.parts import Feed
from polyquant.types import Shape

__all__ = ["ShortConv"]


@dataclass(frozen=True, slots=True)
class ShortConv:
    """The short convolution after a norm; Hyper's short_conv is the kernel size."""

    norm: str = "attn_norm"
    runtime: ClassVar[str] = "polyquant.runtime.short_conv:ShortConv"

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """See parts.Part. The kernel may have a bias, so no scale can be moved through it."""
        return (
            Feed(self.norm, ("shortconv.in_proj",), "norm"),
            Feed("shortconv.in_proj", ("shortconv.out_proj",), "activation"),
        )

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See parts.Part."""
        hidden = hyper.hidden
        return {self.norm: (hidden,), "shortconv.in_proj": (3 * hidden, hidden), "shortconv.out_proj": (hidden, hidden)}

    def parameters(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See parts.Part."""
        return {"shortconv.conv.weight": (hyper.hidden, hyper.count("short_conv"))}
