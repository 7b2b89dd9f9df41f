"""What can be asked of an msModelSlim folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from polyquant.errors import PlanError
from polyquant.formats.msmodelslim.describe import DIALECTS

__all__ = ["AUTO", "MsModelSlimOptions", "Smooth"]

Smooth = Literal["m1", "m4", "shift"]
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

    kv: str | None = None
    smooth: Smooth | None = None
    dialect: str = "v1"
    keep: tuple[str, ...] = ()
    exact_tool: bool = False
    effort: str | None = None
    calibration: str | None = None
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    dtype: str = "bf16"
    keep_error: float | None = None

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
