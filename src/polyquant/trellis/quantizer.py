"""Quantization of a float model to Trellis v3.

quantizer = TrellisQuantizer("models/MyModel", bits=3)
quantizer.save(output_path="models/MyModel-Trellis-3bpw", shard_size="2GB")
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyquant.conversion.convert import plan, quantize
from polyquant.conversion.report import Report
from polyquant.conversion.steps import Plan
from polyquant.formats.sizes import DEFAULT_SHARD_SIZE, shard_bytes
from polyquant.formats.steps import Progress
from polyquant.formats.trellis.format import TRELLIS
from polyquant.storage.staging import Resume

__all__ = ["DEFAULT_BITS", "TrellisQuantizer"]

DEFAULT_BITS = 3
_SAYS_HOW_SMALL = ("bits", "codec", "recipe", "target_bpw")


class TrellisQuantizer:
    """A model and its quantization options. `save` runs it, and can be called again with another shard size."""

    def __init__(self, model_path: str | os.PathLike[str], **options: Any) -> None:
        """Set the model and options.

        model_path: a Hugging Face folder or anything else that `polyquant.open` opens. options: those of
        `polyquant.plan`, e.g. bits (default 3) or target_bpw, effort "fast", "default" or "max", method
        "trellis_viterbi" or "trellis_ldlq", calibration (a text file), rules=["lm_head=trellis.6"].
        """
        self.model_path = Path(model_path)
        chosen: Any = {"allow_unknown": True, **options}  # some layers only are accepted
        if not any(chosen.get(key) is not None for key in _SAYS_HOW_SMALL):
            chosen["bits"] = DEFAULT_BITS
        self.options: dict[str, Any] = chosen

    def plan(self) -> Plan:
        """Return the plan with every step and size. Raises InputError, PlanError, UnknownNameError, CodecError."""
        return plan(self.model_path, TRELLIS.name, **self.options)

    def save(
        self,
        output_path: str | os.PathLike[str],
        shard_size: int | str = DEFAULT_SHARD_SIZE,
        *,
        resume: Resume = "auto",
        overwrite: bool = False,
        threads: int | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Report:
        """Quantize into the folder `output_path`, which appears only when complete; the same call resumes after a kill.

        shard_size: maximum bytes per shard, a number or "2GB". Returns the report with the error of each tensor. Raises
        as `plan` does, and OSError.
        """
        options: dict[str, Any] = {**self.options, "shard_bytes": shard_bytes(shard_size)}
        return quantize(
            self.model_path, output_path, to=TRELLIS.name, resume=resume, overwrite=overwrite, threads=threads,
            on_progress=on_progress, **options
        )  # fmt: skip
