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

import numpy as np
import pytest

from polyquant.ops import native

PATIENCE = 1200 if "POLYQUANT_SANITIZED" in os.environ else 120
"""Seconds of wall-clock time until an answer."""

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels here")

if native.available():
    from ops.binding_calls import SOUND, members

    NAMES = [*members(), "every codec", "over time"]
else:
    NAMES = []


def test_every_binding_has_a_valid_call():
    """New bindings are called with odd values at once; add them to the table to vary single arguments."""
    assert members() == sorted(SOUND)


@pytest.fixture(scope="module", params=[100, pytest.param(1000, marks=pytest.mark.slow)])
def child(request):
    """The process that forks for each binding, with this many calls of several invalid arguments."""
    running = subprocess.Popen(
        [sys.executable, "-W", "ignore", Path(__file__).with_name("binding_child.py"), str(request.param)],
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
    assert select.select([child.stdout], [], [], PATIENCE)[0], "hangs"
    done = json.loads(child.stdout.readline())
    assert done["code"] == 0, f"exit {done['code']} at:\n{done['err']}"
    found = json.loads(done["out"])
    assert found["calls"] and not found["problems"]


def test_floats_at_odd_addresses_are_copied_or_refused():
    """Kernels read aligned floats; numpy arrays at any offset of a buffer are not."""
    even = np.arange(256, dtype=np.float32).reshape(1, 256)
    room = np.zeros(even.nbytes + 8, np.uint8)
    start = next(i for i in range(8) if (room.ctypes.data + i) % 4 == 1)
    odd = room[start : start + even.nbytes].view(np.float32).reshape(1, 256)
    odd[:] = even
    assert not odd.flags.aligned
    lib = native.lib()
    grids = []
    for w in (even, odd):
        scale, offset = np.empty((1, 2), np.float32), np.empty((1, 2), np.float32)
        lib.affine_grid(w, scale, offset, 8, True)
        grids.append((scale.tobytes(), offset.tobytes()))
    assert grids[0] == grids[1]
    weight, out = np.ones(256, np.float32), np.empty_like(even)
    lib.rms_norm(even, weight, out, 1e-6)
    for arguments in ((odd, weight, out), (even, odd[0], out), (even, weight, odd)):
        with pytest.raises(TypeError):
            lib.rms_norm(*arguments, 1e-6)
