"""Tensors of Hugging Face folders in an unsupported quantization scheme: shown as stored, never dequantized.

undecoded.<dtype>   dtype of the header, e.g. undecoded.u32: words of packed codes; undecoded.f8_e4m3: unscaled values
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NoReturn

from polyquant.codecs.dtypes import PLAIN
from polyquant.codecs.opaque import OpaqueCodec
from polyquant.errors import UnsupportedError
from polyquant.registry import codec
from polyquant.types import F32, ArraySpec, Parts, Shape

__all__ = ["UndecodedDtype"]


@dataclass(frozen=True, slots=True)
class UndecodedDtype(OpaqueCodec):
    """A tensor in an unsupported scheme. dtype: its safetensors dtype, one of PLAIN. why: the scheme."""

    dtype: str = "U8"
    part: ClassVar[str] = "blocks"

    @property
    def name(self) -> str:
        """undecoded.<dtype in lower case>."""
        return f"undecoded.{self.dtype.lower()}"

    @property
    def finding(self) -> None:
        """None: the format reports one finding for all such tensors."""
        return None

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the stored array."""
        return codec(PLAIN[self.dtype]).specs(shape)

    def quantize(self, w: F32, *, importance: F32 | None = None) -> NoReturn:
        """Raises UnsupportedError naming the scheme."""
        raise UnsupportedError(f"unsupported quantization scheme: {self.why}", hint="choose another codec")

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> NoReturn:
        """Raises UnsupportedError naming the scheme."""
        raise UnsupportedError(
            f"unsupported quantization scheme: {self.why}",
            expected="float weights",
            found=f"{self.dtype} {list(shape)}",
            hint="use `parts` for the stored array",
        )
