"""Conversion of any Trellis folder or EXL3 model to Trellis v3, without requantizing."""

from __future__ import annotations

import os
from collections.abc import Callable

from polyquant.conversion.convert import convert
from polyquant.conversion.report import Report
from polyquant.formats.sizes import DEFAULT_SHARD_SIZE, shard_bytes
from polyquant.formats.steps import Progress
from polyquant.trellis.loader import TrellisModelLoader

__all__ = ["convert_to_v3"]


def convert_to_v3(
    loader: TrellisModelLoader | str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    shard_size: int | str = DEFAULT_SHARD_SIZE,
    *,
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Write the model of `loader` (or of a path) to the folder `output_path`, which appears only when complete.

    shard_size: maximum bytes per shard, a number or "2GB"; a larger tensor gets its own shard. One tensor is in memory
    at a time. Folders with some layers only are accepted. Raises InputError, PlanError, OSError.
    """
    limit = shard_bytes(shard_size)
    opened = loader if isinstance(loader, TrellisModelLoader) else TrellisModelLoader(loader)
    return convert(
        opened.path, output_path, to="trellis-v3", shard_bytes=limit, repair=opened.repair, axes=opened.axes,
        overwrite=overwrite, allow_unknown=True, on_progress=on_progress,
    )  # fmt: skip
