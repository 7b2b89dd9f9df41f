"""Measure start-up: `import polyquant` and `polyquant --help`, each in a new Python process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from measure import Row, Section, in_turn


def rows() -> Iterator[Row]:
    """Compare with the bars in ms; `python`: an interpreter without any program."""

    def run(code: str) -> None:
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)

    help_code = "from polyquant.cli import main; main(['--help'])"
    bare, imported, helped = in_turn(lambda: run(""), lambda: run("import polyquant"), lambda: run(help_code))
    for name, seconds, bar in (("import polyquant", imported, 200.0), ("polyquant --help", helped, 300.0)):
        yield Row(name, "ms", 1e3 * seconds, bar, 1.0, extra={"python": 1e3 * bare})


SECTION = Section("start-up, whole processes, against 200 and 300 ms", rows)
