"""What can be asked of an msModelSlim folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from polyquant.errors import PlanError
from polyquant.formats.sizes import shard_bytes as parse_size
from polyquant.options import option

__all__ = ["AUTO", "DIALECTS", "MsModelSlimOptions", "Ranges", "Smooth"]

DIALECTS = ("v1", "ascendv1", "v0")

Smooth = Literal["m1", "m4", "shift"]
Ranges = Mapping[str, tuple[float, float]]
"""Linear layer -> (least, greatest) input."""
_CACHES = ("c8", "c8.asym")
_SMOOTH = ("m1", "m4", "shift")
AUTO = "auto"
"""In place of a glob of --keep: layers that the plan finds itself."""
_CALIBRATE = "add --calibration FILE"


@dataclass(frozen=True, slots=True)
class MsModelSlimOptions:
    """kv: "c8" or "c8.asym" for the scales of an int8 cache; smooth: weights take over what makes inputs hard to round; dialect: of the files.

    keep: globs of linear layers that stay float, or "auto" for those without which the model differs by at most keep_error (KL divergence, nats). exact_tool: the tool's own rounding instead of less error; effort "max": codes of least error of
    the outputs on the calibration text. calibration: a UTF-8 file; ranges: linear layer -> (least, greatest) input, in its place. dtype: "f16", "bf16"
    or "f32", what the model computes in: the plan fills it in from config.json.
    """

    kv: str | None = option(
        choices=_CACHES, help="Scales for a cache of int8, with offsets or without; needs --calibration."
    )
    smooth: Smooth | None = option(
        choices=_SMOOTH,
        help="SmoothQuant: move activation outliers into the weights, with exponent 0.5, with 0.9 between more layers, or with inputs centred too; "
        "needs --calibration.",
    )
    dialect: str = option(
        "v1",
        choices=DIALECTS,
        shown="v1",
        help="Files as msModelSlim's current command line writes them, or one of its two older forms.",
    )
    keep: tuple[str, ...] = option(
        (),
        multiple=True,
        metavar="GLOB|auto",
        help="Linear layers that stay float; repeatable. auto: as few as keep the model within --keep-error; needs --calibration.",
    )
    exact_tool: bool = option(
        False, type=bool, help="The tool's integers bit for bit, computed in the model's type; its error is larger."
    )
    effort: str | None = option(choices=("default", "max"), shown="default", help="max searches, with --calibration.")
    calibration: str | None = option(
        metavar="FILE|self", help="Text on which the float model shows what its layers read; self: text that it writes."
    )
    ranges: Ranges | str | os.PathLike[str] | None = option(
        type=Path,
        metavar="FILE",
        help="w8a8 without a calibration: JSON {linear layer: [least, greatest input]}, or the tool's calib_stats.json.",
    )
    keep_error: float | None = option(
        type=float,
        low=0,
        low_open=True,
        metavar="X",
        shown="0.01",
        help="Limit of --keep auto: mean KL divergence of the next token, in nats.",
    )
    shard_bytes: int | None = option(
        help="Largest shard, e.g. 2GB.", flag="--shard-size", metavar="SIZE", parse=parse_size, shown="4GB"
    )
    dtype: str = "bf16"

    @property
    def input_ranges(self) -> Ranges:
        """The ranges, read. Only after `for_model`."""
        assert self.ranges is None or isinstance(self.ranges, Mapping)
        return self.ranges or {}

    def refuse(self) -> None:
        """Raises PlanError for options that do not go together."""
        if self.dialect not in DIALECTS:
            raise PlanError("no such dialect of msModelSlim", expected=" or ".join(DIALECTS), found=self.dialect)
        if self.kv not in (None, *_CACHES):
            raise PlanError("no such type of a cache", expected=" or ".join(_CACHES), found=self.kv)
        if self.smooth not in (None, *_SMOOTH):
            raise PlanError("no such smoothing", expected=" or ".join(_SMOOTH), found=self.smooth)
        if self.effort not in (None, "default", "max"):
            raise PlanError("no such effort for an msModelSlim folder", expected="default or max", found=self.effort)
        if self.keep_error is not None and AUTO not in self.keep:
            raise PlanError("--keep-error is the limit of --keep auto", hint="add --keep auto")
        if self.exact_tool and self.effort == "max":
            raise PlanError("the tool knows no --effort max", hint="leave out --exact-tool, or --effort max")
        if (wanting := self.wanting) is not None and self.calibration is None:
            raise PlanError(f"{wanting} needs to see what the model computes", hint=_CALIBRATE)
        if self.ranges and self.calibration is not None:
            raise PlanError("--ranges and --calibration say the inputs' ranges twice", hint="leave out one of them")

    @property
    def wanting(self) -> str | None:
        """The first option that only a calibration text can serve, as the command line calls it."""
        said = {
            f"--kv {self.kv}": self.kv is not None,
            f"--smooth {self.smooth}": self.smooth is not None,
            "--effort max": self.effort == "max",
            "--keep auto": AUTO in self.keep,
        }
        return next((name for name, given in said.items() if given), None)
