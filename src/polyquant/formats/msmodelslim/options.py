"""Options for writing an msModelSlim folder."""

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
"""Linear layer -> (minimum, maximum) of its inputs."""
_CACHES = ("c8", "c8.asym")
_SMOOTH = ("m1", "m4", "shift")
AUTO = "auto"
"""Instead of a glob of --keep: choose layers automatically."""
_CALIBRATE = "add --calibration FILE"


@dataclass(frozen=True, slots=True)
class MsModelSlimOptions:
    """Options for writing.

    kv: "c8" or "c8.asym" for the scales of an int8 cache; smooth: move activation outliers into the weights; dialect:
    of the files. keep: globs of linear layers that stay float, or "auto" for the fewest layers with which the model
    differs by at most keep_error (KL divergence, nats). exact_tool: the tool's rounding instead of a smaller error;
    effort "max": search codes with the least output error on the calibration text. calibration: a UTF-8 file; ranges:
    linear layer -> (minimum, maximum) of its inputs, instead of calibration. dtype: "f16", "bf16" or "f32", the model's
    compute type, which the plan sets from config.json.
    """

    kv: str | None = option(
        choices=_CACHES, help="Scales for an int8 KV cache, with or without offsets; needs --calibration."
    )
    smooth: Smooth | None = option(
        choices=_SMOOTH,
        help="SmoothQuant: move activation outliers into the weights. m1: exponent 0.5; m4: 0.9, between more layers; "
        "shift: "
        "also centre the inputs. Needs --calibration.",
    )
    dialect: str = option(
        "v1",
        choices=DIALECTS,
        shown="v1",
        help="File format of msModelSlim's current command line, or one of its two older forms.",
    )
    keep: tuple[str, ...] = option(
        (),
        multiple=True,
        metavar="GLOB|auto",
        help="Linear layers that stay float; repeatable. auto: the fewest that keep the model within --keep-error; "
        "needs "
        "--calibration.",
    )
    exact_tool: bool = option(
        False,
        type=bool,
        help="Reproduce the tool's integers bit for bit, computed in the model's type; the error is larger.",
    )
    effort: str | None = option(
        choices=("default", "max"), shown="default", help="max: search for better codes; needs --calibration."
    )
    calibration: str | None = option(metavar="FILE|self", help="Calibration text; self: text that the model generates.")
    ranges: Ranges | str | os.PathLike[str] | None = option(
        type=Path,
        metavar="FILE",
        help="w8a8 without calibration: JSON {linear layer: [minimum, maximum input]}, or the tool's calib_stats.json.",
    )
    keep_error: float | None = option(
        type=float,
        low=0,
        low_open=True,
        metavar="X",
        shown="0.01",
        help="Limit of --keep auto: mean KL divergence per token, in nats.",
    )
    shard_bytes: int | None = option(
        help="Maximum size of a shard, e.g. 2GB.", flag="--shard-size", metavar="SIZE", parse=parse_size, shown="4GB"
    )
    dtype: str = "bf16"

    @property
    def input_ranges(self) -> Ranges:
        """The loaded ranges. Only after `for_model`."""
        assert self.ranges is None or isinstance(self.ranges, Mapping)
        return self.ranges or {}

    def refuse(self) -> None:
        """Raise PlanError for incompatible options."""
        if self.dialect not in DIALECTS:
            raise PlanError("unknown dialect of msModelSlim", expected=" or ".join(DIALECTS), found=self.dialect)
        if self.kv not in (None, *_CACHES):
            raise PlanError("unknown cache type", expected=" or ".join(_CACHES), found=self.kv)
        if self.smooth not in (None, *_SMOOTH):
            raise PlanError("unknown smoothing method", expected=" or ".join(_SMOOTH), found=self.smooth)
        if self.effort not in (None, "default", "max"):
            raise PlanError("unknown effort for an msModelSlim folder", expected="default or max", found=self.effort)
        if self.keep_error is not None and AUTO not in self.keep:
            raise PlanError("--keep-error requires --keep auto", hint="add --keep auto")
        if self.exact_tool and self.effort == "max":
            raise PlanError("--exact-tool and --effort max are mutually exclusive", hint="omit one of them")
        if (calibrated_option := self.calibrated_option) is not None and self.calibration is None:
            raise PlanError(f"{calibrated_option} needs calibration", hint=_CALIBRATE)
        if self.ranges and self.calibration is not None:
            raise PlanError("--ranges and --calibration are mutually exclusive", hint="omit one of them")

    @property
    def calibrated_option(self) -> str | None:
        """The first given option that needs calibration, as on the command line."""
        needs = {
            f"--kv {self.kv}": self.kv is not None,
            f"--smooth {self.smooth}": self.smooth is not None,
            "--effort max": self.effort == "max",
            "--keep auto": AUTO in self.keep,
        }
        return next((name for name, given in needs.items() if given), None)
