"""`polyquant report` of a 1B pair against `polyquant compare` of the same pair: whole processes, in turn."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from measure import Row, Section, in_turn
from synthetic import write_llama

BAR_TIMES = 1.2


def rows() -> Iterator[Row]:
    """Compare wall times, and the size of the page with the limit."""
    with tempfile.TemporaryDirectory() as folder:
        source, target, page = (str(Path(folder, name)) for name in ("hf", "q8_0.gguf", "report.html"))
        write_llama(Path(source))

        def run(*args: str) -> None:
            subprocess.run([sys.executable, "-m", "polyquant", *args], check=True, capture_output=True)

        run("convert", source, target, "--codec", "q8_0", "--no-measure")
        reported, compared = in_turn(
            lambda: run("report", source, target, "-o", page, "--overwrite"),
            lambda: run("compare", source, target),
            repeats=5,
        )
        yield Row("report of a 1B pair, peer compare", "s", reported, compared, 1 / BAR_TIMES)
        yield Row("its page, peer the limit", "MB", Path(page).stat().st_size / 1e6, 2.0, 1.0)


SECTION = Section("report of a 1B pair, against comparing alone (bar: 1.2 times its time)", rows)
