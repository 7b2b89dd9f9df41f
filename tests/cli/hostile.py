"""The hostile corpus: every case of the tables of bad input, with the expected answers in hostile.json.

PYTHONPATH=tests python -m cli.hostile     rewrites the manifest: case -> command -> [exit code, start of its message]
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

from cli.bad_inputs import COSTLY, INCOMPLETE, UNLIKELY, UNTRANSLATABLE, UNUSABLE, Maker
from cli.bad_models import UNRUNNABLE
from cli.child import Outcome, Server
from cli.evil_inputs import EVIL_INPUTS

MANIFEST = Path(__file__).with_suffix(".json")
CASES: dict[str, Maker] = {
    f"{group}: {name}": make
    for group, table in (
        ("unusable", UNUSABLE),
        ("untranslatable", UNTRANSLATABLE),
        ("incomplete", INCOMPLETE),
        ("unlikely", UNLIKELY),
        ("not to run", UNRUNNABLE),
        ("terminal", EVIL_INPUTS),
    )
    for name, make in table.items()
    if name not in COSTLY  # at the limits of size, with limits of time in test_bad_inputs.py
}
_COMMANDS = {"unusable": "validate", "not to run": "run"}


def command(case: str) -> str:
    """The command that a case is mainly for."""
    return _COMMANDS.get(case.partition(":")[0], "convert")


def arguments(verb: str, path: Path, folder: Path) -> list[object]:
    """Words of the command line."""
    more = {"convert": [folder / "out.gguf"], "run": ["-p", "x", "-n", "1"]}
    return [verb, path, *more.get(verb, [])]


def message(outcome: Outcome) -> str:
    """The start of the message, without the path of the case."""
    lines = (outcome.err or outcome.out).splitlines()
    text = next((line for line in lines if line.startswith("polyquant: ")), "") if outcome.code else ""
    return re.sub(r"^polyquant: (/\S*: )?", "", text)[:50]


def main() -> None:
    """Write the manifest."""
    server = Server()
    found = {}
    for case, make in CASES.items():
        with tempfile.TemporaryDirectory() as scratch:
            room = Path(scratch) / "in"
            room.mkdir()
            verb = command(case)
            outcome = server.run(*arguments(verb, make(room), Path(scratch)))
            found[case] = {verb: [outcome.code, message(outcome)]}
    server.close()
    MANIFEST.write_text(json.dumps(found, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
