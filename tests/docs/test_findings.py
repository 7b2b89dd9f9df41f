"""docs/findings.md matches the code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import polyquant

ROOT = Path(__file__).resolve().parents[2]


def test_findings_page_is_up_to_date():
    source = str(Path(polyquant.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "list_findings.py", "--check"],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
