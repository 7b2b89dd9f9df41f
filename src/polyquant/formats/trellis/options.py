"""What can be said of a Trellis folder, and asked of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polyquant.errors import PlanError
from polyquant.formats.sizes import shard_bytes as parse_size
from polyquant.options import option
from polyquant.registry import codec

__all__ = ["EFFORT", "METHODS", "Effort", "Method", "TrellisOpenOptions", "TrellisOptions"]

METHODS = ("trellis_viterbi", "trellis_ldlq")
"""What quantization_method may say: the least error of the weights, or of the layers' outputs."""
Effort = Literal["fast", "default", "max"]
Method = Literal["trellis_viterbi", "trellis_ldlq"]
EFFORT: dict[str, int] = {"fast": 12, "default": 14, "max": 16}
"""Window of the code in bits: each two more take four times the time, and lower the error by 1 to 3 percent."""


@dataclass(frozen=True, slots=True)
class TrellisOpenOptions:
    """Of a folder whose files do not tell everything."""

    repair: bool = option(
        False, type=bool, help="Trellis of Metal Marlin: what its quantizer meant, not what its decoder reads."
    )
    axes: str | None = option(choices=("kn", "nk"), help="Trellis: how tiles lie, where a source does not show it.")


@dataclass(frozen=True, slots=True)
class TrellisOptions:
    """bits: of each quantized weight; effort: the window (EFFORT); codebook: "mul1", "mcg", "3inst" or "grid", which has no window.

    method: how codes are searched, by default with calibration where there is a text; calibration: a UTF-8 file, or "self" for text that the model
    writes; target_bpw: effective bits per quantized weight, in place of `bits`: then each tensor gets its own.
    """

    bits: int | None = option(
        type=int,
        low=2,
        high=8,
        help="Bits of the matrices of linear layers. Embeddings, head, norms and routers stay float unless a rule names them.",
    )
    effort: Effort | None = option(
        choices=("fast", "default", "max"),
        shown="default",
        help="Window of 12, 14 or 16 bits; each step takes four times as long and errs 1 to 3 percent less.",
    )
    codebook: str | None = option(
        choices=("mul1", "mcg", "3inst", "grid"),
        shown="mul1",
        help="grid for programs that know no other (no window, no rotation).",
    )
    method: Method | None = option(
        choices=METHODS,
        shown="trellis_ldlq with --calibration",
        help="Least error of the weights, or of the layers' outputs on the calibration text.",
    )
    calibration: str | None = option(
        metavar="FILE|self", help="Text on which the float model shows what its layers read; self: text that it writes."
    )
    target_bpw: float | None = option(
        type=float,
        low=2,
        high=16,
        metavar="X",
        help="In place of --bits: 2 to 8 bits for each weight, X in the mean with all scales, for the least harm.",
    )
    shard_bytes: int | None = option(
        help="Largest shard, e.g. 2GB.", flag="--shard-size", metavar="SIZE", parse=parse_size, shown="2GB"
    )

    @property
    def sizes(self) -> str | None:
        """The first option that says which codes, as the command line calls it; None if all are left out."""
        said = {
            "--bits": self.bits,
            "--target-bpw": self.target_bpw,
            "--effort": self.effort,
            "--codebook": self.codebook,
        }
        return next((name for name, value in said.items() if value is not None), None)

    @property
    def given(self) -> str | None:
        """The first option that says something."""
        said = {"--method": self.method, "--calibration": self.calibration}
        return self.sizes or next((name for name, value in said.items() if value is not None), None)

    @property
    def calibrated(self) -> bool:
        """True if codes are searched with Hessians."""
        return self.calibration is not None and self.method != "trellis_viterbi"

    def refuse(self) -> None:
        """Raises PlanError for options that do not go together."""
        if self.method not in (None, *METHODS):
            raise PlanError("no such method", expected=" or ".join(METHODS), found=self.method)
        if self.method == "trellis_ldlq" and self.calibration is None:
            raise PlanError(
                "trellis_ldlq needs to see the inputs of each layer",
                hint="add --calibration FILE, or --calibration self for text that the model writes",
            )
        if self.method == "trellis_viterbi" and self.calibration is not None and self.target_bpw is None:
            raise PlanError("trellis_viterbi reads no calibration text", hint="leave out --method, or --calibration")
        if self.target_bpw is not None and self.bits is not None:
            raise PlanError("--bits and --target-bpw say how small twice", hint="leave out one of them")
        if self.target_bpw is not None and not 2 <= self.target_bpw <= 16:
            raise PlanError("no such size", expected="2 to 9 bits per weight", found=self.target_bpw)

    def codec_name(self, bits: int) -> str:
        """The codec for a number of bits. Raises PlanError for options that do not go together, and for bits that it has not."""
        if not 2 <= bits <= 8:
            raise PlanError("no such width", expected="2 to 8 bits", found=bits)
        book = self.codebook or "mul1"
        if book == "grid":
            if self.effort is not None:
                raise PlanError("the codebook 'grid' has no window", hint="leave out --effort, or --codebook grid")
            return codec("trellis.3", codebook="grid", bits=bits, window_bits=bits).name
        return codec("trellis.3", codebook=book, bits=bits, window_bits=EFFORT[self.effort or "default"]).name
