"""Unknown GGUF types: the bytes are copied, never interpreted.

    ggml.type_N   [bytes defined by the program that wrote it]   size from the next tensor's offset

One instance per tensor, since only the file knows the size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NoReturn

import numpy as np

from polyquant.codecs.arguments import of_form, part
from polyquant.codecs.named import NamedCodec
from polyquant.errors import CodecError, UnsupportedError
from polyquant.types import F32, U8, ArraySpec, Blocks, Parts, Shape

__all__ = ["OpaqueCodec"]


@dataclass(frozen=True, slots=True)
class OpaqueCodec(NamedCodec):
    """The bytes of one tensor of an unknown GGUF type.

    why: a note on the type, for messages. part: name of the part.
    """

    type_id: int
    nbytes: int
    why: str = "polyquant does not know this type"
    part: ClassVar[str] = "bytes"

    @property
    def name(self) -> str:
        """ggml.type_<number>."""
        return f"ggml.type_{self.type_id}"

    @property
    def form(self) -> type[Blocks]:
        """Blocks: bytes of an unknown type."""
        return Blocks

    @property
    def finding(self) -> str | None:
        """Message that `validate` reports for such a tensor."""
        return f"type {self.name} is unknown"

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """{part: u8 [nbytes]} for any shape."""
        return {self.part: ArraySpec((self.nbytes,), np.dtype(np.uint8))}

    def quantize(self, w: F32, *, importance: F32 | None = None) -> NoReturn:
        """Raises UnsupportedError."""
        raise UnsupportedError(f"type number {self.type_id} cannot be written: {self.why}", hint="choose another codec")

    def pack(self, codes: Blocks) -> dict[str, U8]:
        """Return the bytes unchanged. Raises CodecError for codes of a different type or size."""
        of_form(self, codes)
        if codes.codec != self.name or codes.blocks.nbytes != self.nbytes:
            raise CodecError("cannot pack bytes of a different type", expected=self.name, found=codes.codec)
        return {self.part: codes.blocks}

    def unpack(self, parts: Parts, shape: Shape) -> Blocks:
        """Return the bytes unchanged. Raises CodecError if the size is wrong."""
        stored = part(parts, self.part)
        if stored.dtype != np.uint8 or stored.nbytes != self.nbytes:
            raise CodecError(f"bytes of {self.name} do not fit", expected=self.nbytes, found=stored.nbytes)
        return Blocks(self.name, stored.reshape(self.specs(shape)[self.part].shape))

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> NoReturn:
        """Raises UnsupportedError naming the type number."""
        raise UnsupportedError(
            f"type number {self.type_id} cannot be decoded: {self.why}",
            hint="the tensor can be copied unchanged into another GGUF file",
        )
