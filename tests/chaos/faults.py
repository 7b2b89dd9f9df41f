"""Storage faults in a worker (`dask worker --preload`): 5 % of reads and writes of large files fail with EIO."""

from __future__ import annotations

import errno
import os
import random
from typing import Any

from polyquant.conversion.engines import worker as _imported_in_advance  # noqa: F401

_SHARE = 0.05


def dask_setup(worker: Any) -> None:
    """Called by Dask in each worker process."""
    rng = random.Random(os.getpid())

    def faulty(call: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            if rng.random() < _SHARE:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(*args)

        return wrapped

    os.pwrite, os.preadv = faulty(os.pwrite), faulty(os.preadv)
