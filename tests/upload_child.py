"""A conversion in a process that tests kill: `upload_child.py SOURCE TARGET OPTIONS`, with small parts."""

from __future__ import annotations

import json
import sys

import polyquant as pq
from polyquant.errors import PolyquantError
from polyquant.storage.remote import retry, upload_parts

PART = 20_000


def small_parts() -> None:
    """Upload small parts, and wait little between attempts."""
    upload_parts._LEAST, upload_parts._MIB = PART, 1
    retry.FIRST_DELAY = 0.01


if __name__ == "__main__":
    small_parts()
    source, target, options = sys.argv[1:]
    try:
        pq.convert(source, target, **json.loads(options))
    except PolyquantError as problem:
        print(problem, *getattr(problem, "__notes__", ()), sep="\n", file=sys.stderr)
        sys.exit(2)
