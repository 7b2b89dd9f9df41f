"""Write one small file that appears only when complete."""

from __future__ import annotations

import hashlib
from pathlib import Path

from polyquant.storage.staging import staged
from polyquant.types import FilePlan, Layout

__all__ = ["write_file"]


def write_file(target: Path, data: bytes, *, overwrite: bool) -> None:
    """Write `data` to `target`. overwrite: replace an existing file, which the caller has checked.

    Raises PlanError if the target exists and must not be replaced, OSError.
    """
    layout = Layout((FilePlan(target.name, len(data), ((0, data),)),), {}, folder=False)
    job = hashlib.sha256(data).hexdigest()
    with staged(target, layout, job, resume="never", replaceable=(lambda _: ()) if overwrite else None):
        pass
