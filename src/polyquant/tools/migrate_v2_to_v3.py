"""Migration of Trellis models to v3.

    python -m polyquant.tools.migrate_v2_to_v3 --input models/Model-Trellis-v2 --output models/Model-Trellis-v3 \\
        --shard-size 2GB

Accepts every Trellis dialect and EXL3, and keeps all codes. Exit 0: done, 2: refused or failed, with a one-line error.
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
    """Parse arguments, migrate, print; return the exit code."""
    parser = argparse.ArgumentParser(prog="migrate_v2_to_v3", description="Write a Trellis model as Trellis v3.")
    parser.add_argument("--input", required=True, metavar="DIR", help="Trellis v2 or v3 folder of any dialect")
    parser.add_argument("--output", required=True, metavar="DIR", help="new folder")
    parser.add_argument("--shard-size", default=DEFAULT_SHARD_SIZE, metavar="SIZE", help="default: %(default)s")
    parser.add_argument("--repair", action="store_true", help="decode Metal Marlin files as its quantizer intended")
    parser.add_argument("--axes", choices=("kn", "nk"), help="orientation of tiles, if the input does not tell")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    options = parser.parse_args(arguments)
    try:
        loader = TrellisModelLoader(options.input, repair=options.repair, axes=options.axes)
        watch = _show if sys.stderr.isatty() else None
        report = convert_to_v3(
            loader, options.output, options.shard_size, overwrite=options.overwrite, on_progress=watch
        )
    except (PolyquantError, OSError) as problem:
        print(f"migrate_v2_to_v3: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("migrate_v2_to_v3: interrupted; no output was written", file=sys.stderr)
        return 130
    for warning in report.warnings:
        print(f"migrate_v2_to_v3: {printable(warning, 400)}", file=sys.stderr)
    print(f"{printable(report.path)}: {len(report.steps)} tensors, {report.nbytes:,} bytes, {report.seconds:.1f} s")
    return 0


def _show(progress: Progress) -> None:
    """Show progress on one terminal line, overwriting it."""
    end = "\n" if progress.done >= progress.total else ""
    share = progress.done / max(1, progress.total)
    print(f"\r{share:4.0%} {printable(progress.tensor, 60):<60}", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
