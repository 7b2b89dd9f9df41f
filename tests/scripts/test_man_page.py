"""man/polyquant.1 is that of the commands, and valid."""

import shutil
import subprocess

import pytest

import man_page
from polyquant.cli import COMMANDS


def test_page_is_up_to_date():
    assert man_page.PAGE.read_text(encoding="utf-8") == man_page.text(), (
        "run: PYTHONPATH=src python scripts/man_page.py"
    )


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_page_has_no_warnings():
    command = ["groff", "-man", "-Tutf8", "-ww", "-rLL=100n", "-P-c", "-P-b", "-P-u", str(man_page.PAGE)]
    shown = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    )
    assert not shown.stderr
    for name in COMMANDS:
        assert f"polyquant {name} " in shown.stdout
    for option in ("--max-memory SIZE", "--rule '*ffn_down*=q6_k'", "EXIT STATUS"):
        assert option in shown.stdout
