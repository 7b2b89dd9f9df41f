"""Options for opening and writing Trellis folders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polyquant.errors import PlanError
from polyquant.formats.sizes import shard_bytes as parse_size
from polyquant.options import option
from polyquant.registry import codec

__all__ = ["EFFORT", "METHODS", "Effort", "Method", "TrellisOpenOptions", "TrellisOptions"]

METHODS = ("trellis_viterbi", "trellis_ldlq")
"""Values of quantization_method: least error of the weights, or of the layers' outputs."""
Effort = Literal["fast", "default", "max"]
Method = Literal["trellis_viterbi", "trellis_ldlq"]
EFFORT: dict[str, int] = {"fast": 12, "default": 14, "max": 16}
"""Window of the code in bits: two bits more take four times as long and lower the error by 1 to 3 percent."""


@dataclass(frozen=True, slots=True)
class TrellisOpenOptions:
    """Options for opening: properties that the files do not show."""

    repair: bool = option(
        False, type=bool, help="Trellis of Metal Marlin: decode as its quantizer intended, not as its decoder does."
    )
    axes: str | None = option(choices=("kn", "nk"), help="Trellis: tile order, if the source does not show it.")


@dataclass(frozen=True, slots=True)
class TrellisOptions:
    """Options for writing.

    bits: of each quantized weight; effort: the window (EFFORT); codebook: "mul1", "mcg", "3inst" or "grid", which has
    no window. method: how codes are searched, default: with Hessians if there is a calibration text; calibration: a
    UTF-8 file, or "self" for generated text; target_bpw: effective bits per quantized weight instead of `bits`,
    allocated per tensor.
    """

    bits: int | None = option(
        type=int,
        low=2,
        high=8,
        help="Bits of the matrices of linear layers. Embeddings, head, norms and routers stay float unless a rule "
        "names them.",
    )
    effort: Effort | None = option(
        choices=("fast", "default", "max"),
        shown="default",
        help="Window of 12, 14 or 16 bits; each step takes four times as long and lowers the error by 1 to 3 percent.",
    )
    codebook: str | None = option(
        choices=("mul1", "mcg", "3inst", "grid"),
        shown="mul1",
        help="grid: for programs that support nothing newer (no window, no rotation).",
    )
    method: Method | None = option(
        choices=METHODS,
        shown="trellis_ldlq with --calibration",
        help="Minimize the error of the weights, or of the layers' outputs on the calibration text.",
    )
    calibration: str | None = option(metavar="FILE|self", help="Calibration text; self: text that the model generates.")
    target_bpw: float | None = option(
        type=float,
        low=2,
        high=16,
        metavar="X",
        help="Instead of --bits: allocate 2 to 8 bits per weight, X on average including scales, for the least damage.",
    )
    shard_bytes: int | None = option(
        help="Maximum size of a shard, e.g. 2GB.", flag="--shard-size", metavar="SIZE", parse=parse_size, shown="2GB"
    )

    @property
    def sizes(self) -> str | None:
        """The first given option that determines the codes, as on the command line; None if there is none."""
        values = {
            "--bits": self.bits,
            "--target-bpw": self.target_bpw,
            "--effort": self.effort,
            "--codebook": self.codebook,
        }
        return next((name for name, value in values.items() if value is not None), None)

    @property
    def given(self) -> str | None:
        """The first given option."""
        values = {"--method": self.method, "--calibration": self.calibration}
        return self.sizes or next((name for name, value in values.items() if value is not None), None)

    @property
    def calibrated(self) -> bool:
        """True if codes are searched with Hessians."""
        return self.calibration is not None and self.method != "trellis_viterbi"

    def refuse(self) -> None:
        """Raise PlanError for incompatible options."""
        if self.method not in (None, *METHODS):
            raise PlanError("unknown method", expected=" or ".join(METHODS), found=self.method)
        if self.method == "trellis_ldlq" and self.calibration is None:
            raise PlanError(
                "trellis_ldlq needs calibration",
                hint="add --calibration FILE, or --calibration self for generated text",
            )
        if self.method == "trellis_viterbi" and self.calibration is not None and self.target_bpw is None:
            raise PlanError("trellis_viterbi does not use calibration", hint="omit --method or --calibration")
        if self.target_bpw is not None and self.bits is not None:
            raise PlanError("--bits and --target-bpw are mutually exclusive", hint="omit one of them")
        if self.target_bpw is not None and not 2 <= self.target_bpw <= 16:
            raise PlanError("--target-bpw is out of range", expected="2 to 16 bits per weight", found=self.target_bpw)

    def codec_name(self, bits: int) -> str:
        """The codec name for a number of bits. Raises PlanError for incompatible options and unsupported bits."""
        if not 2 <= bits <= 8:
            raise PlanError("unsupported number of bits", expected="2 to 8", found=bits)
        book = self.codebook or "mul1"
        if book == "grid":
            if self.effort is not None:
                raise PlanError("the codebook 'grid' has no window", hint="omit --effort or --codebook grid")
            return codec("trellis.3", codebook="grid", bits=bits, window_bits=bits).name
        return codec("trellis.3", codebook=book, bits=bits, window_bits=EFFORT[self.effort or "default"]).name
