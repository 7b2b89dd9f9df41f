"""No call of the extension module ends the process: each is refused with TypeError or ValueError, or does its work. The calls: binding_child.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyquant.ops import native

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels here")

if native.available():
    from ops.binding_calls import SOUND, members

    NAMES = [*members(), "every codec", "over time"]
else:
    NAMES = []


def test_every_binding_has_a_sound_call():
    """A new binding is called with odd things at once; for its arguments to be changed one by one, it must be in the table too."""
    assert members() == sorted(SOUND)


@pytest.mark.parametrize("name", NAMES)
def test_no_call_ends_the_process(name):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).with_name("binding_child.py"), name],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"exit {done.returncode} at:\n{done.stderr[-1000:]}"
    found = json.loads(done.stdout)
    assert found["calls"] and not found["problems"]
