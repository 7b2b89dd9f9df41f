"""Safetensors dtypes that are not decoded (F4, F6, F8_E8M0, C64, new ones): the bytes are copied, never interpreted.

safetensors.<dtype>   [bytes defined by the program that wrote it]   size from the header
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from polyquant.codecs.opaque import OpaqueCodec
from polyquant.errors import UnsupportedError
from polyquant.types import F32, Parts, Shape

__all__ = ["OpaqueDtype"]


@dataclass(frozen=True, slots=True)
class OpaqueDtype(OpaqueCodec):
    """The bytes of one tensor of a dtype that polyquant cannot decode. dtype: its name in the safetensors header."""

    dtype: str = ""

    @property
    def name(self) -> str:
        """safetensors.<dtype in lower case>."""
        return f"safetensors.{self.dtype.lower()}"

    @property
    def finding(self) -> str:
        """Message that `validate` reports for such a tensor."""
        return f"safetensors dtype {self.dtype} cannot be decoded; it can be copied unchanged into another HF folder"

    def quantize(self, w: F32, *, importance: F32 | None = None) -> NoReturn:
        """Raises UnsupportedError."""
        raise UnsupportedError(f"safetensors dtype {self.dtype} cannot be written", hint="choose another codec")

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> NoReturn:
        """Raises UnsupportedError naming the dtype."""
        raise UnsupportedError(
            f"safetensors dtype {self.dtype} cannot be decoded",
            hint="it can be copied unchanged into another HF folder",
        )
