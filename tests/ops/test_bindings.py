"""No call of the extension module ends the process: each is refused with TypeError or ValueError, or does its work.

The calls: binding_child.py.
"""

from __future__ import annotations

import json
import os
import select
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


def test_every_binding_has_a_valid_call():
    """New bindings are called with odd values at once; add them to the table to vary single arguments."""
    assert members() == sorted(SOUND)


@pytest.fixture(scope="module")
def child():
    """The process that forks for each binding."""
    running = subprocess.Popen(
        [sys.executable, "-W", "ignore", Path(__file__).with_name("binding_child.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    yield running
    running.kill()
    running.wait()


@pytest.mark.parametrize("name", NAMES)
def test_no_call_crashes_the_process(name, child):
    child.stdin.write(name + "\n")
    child.stdin.flush()
    assert select.select([child.stdout], [], [], 120)[0], "hangs"
    done = json.loads(child.stdout.readline())
    assert done["code"] == 0, f"exit {done['code']} at:\n{done['err']}"
    found = json.loads(done["out"])
    assert found["calls"] and not found["problems"]
