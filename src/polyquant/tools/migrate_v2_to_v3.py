"""python -m polyquant.tools.migrate_v2_to_v3 --input models/Model-Trellis-v2 --output models/Model-Trellis-v3 --shard-size 2GB

Takes every Trellis dialect and EXL3; codes are moved, not chosen anew. Exit 0: done, 2: refused or failed, with one line that says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from polyquant.errors import PolyquantError, printable
from polyquant.formats.sizes import DEFAULT_SHARD_SIZE
from polyquant.formats.steps import Progress
from polyquant.trellis.converter import convert_to_v3
from polyquant.trellis.loader import TrellisModelLoader

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, migrate, print; the exit code."""
    parser = argparse.ArgumentParser(prog="migrate_v2_to_v3", description="Write a Trellis model as Trellis v3.")
    parser.add_argument("--input", required=True, metavar="DIR", help="Trellis v2 or v3 folder of any dialect")
    parser.add_argument("--output", required=True, metavar="DIR", help="new folder")
    parser.add_argument("--shard-size", default=DEFAULT_SHARD_SIZE, metavar="SIZE", help="default: %(default)s")
    parser.add_argument("--repair", action="store_true", help="write what Metal Marlin's quantizer meant")
    parser.add_argument("--axes", choices=("kn", "nk"), help="how tiles lie, where the input does not show it")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    asked = parser.parse_args(arguments)
    try:
        loader = TrellisModelLoader(asked.input, repair=asked.repair, axes=asked.axes)
        watch = _show if sys.stderr.isatty() else None
        report = convert_to_v3(loader, asked.output, asked.shard_size, overwrite=asked.overwrite, on_progress=watch)
    except (PolyquantError, OSError) as problem:
        print(f"migrate_v2_to_v3: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("migrate_v2_to_v3: interrupted; nothing was left at the output", file=sys.stderr)
        return 130
    for warning in report.warnings:
        print(f"migrate_v2_to_v3: {printable(warning, 400)}", file=sys.stderr)
    print(f"{printable(report.path)}: {len(report.steps)} tensors, {report.nbytes:,} bytes, {report.seconds:.1f} s")
    return 0


def _show(progress: Progress) -> None:
    """One line on a terminal, written over."""
    end = "\n" if progress.done >= progress.total else ""
    share = progress.done / max(1, progress.total)
    print(f"\r{share:4.0%} {printable(progress.tensor, 60):<60}", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
