"""Call a binding with every kind of invalid argument, in a process that may crash:

    python binding_child.py MANY   one NAME a line of stdin: a function, `Class.method`, "every codec" or "over time"

MANY: with this many valid calls of which two or three arguments are replaced.

Each is called in a fork, which takes numpy and the extension from its parent. Prints one line of JSON for each: exit
status, what the fork printed, and stderr, whose last line is the call at which a fork crashed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from binding_calls import (
    ANY,
    SOUND,
    affine,
    f32,
    guarded,
    handles,
    i8,
    lib,
    others,
    packed,
    plain,
    trellis,
    u8,
)  # fmt: skip

MANY = int(sys.argv[1])
ALLOWED = (TypeError, ValueError)
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
"""Sanitizers reserve terabytes of address space, and end the process if memory is refused."""
SECONDS = 10
"""A call on a few hundred numbers that takes longer reads out of bounds."""


def arguments_of(function: Any) -> list[str]:
    """ "def f(self, x: ndarray[shape=(*, *)], y: int) -> None" -> its text for each argument."""
    found, depth = [""], 0
    for c in function.__nb_signature__[0][0].partition("(")[2]:
        depth += (c in "[(") - (c in "])")
        if depth < 0:
            break
        if c == "," and depth == 0:
            found.append("")
        else:
            found[-1] += c
    return [text for text in map(str.strip, found) if text != "/"]


class Binding:
    """One of `members`, and the misbehaviour of its calls."""

    def __init__(self, name: str) -> None:
        owner, _, member = name.rpartition(".")
        self.name, self.problems, self.calls = name, [], 0
        cls = getattr(lib, owner) if owner else None
        self.raw = vars(cls)[member] if cls is not None and member in vars(cls) else getattr(lib, name, None)
        if member == "__init__":
            self.function: Callable[..., Any] = cls
        else:
            self.function = self.raw if callable(self.raw) else lambda *a: self.raw.__get__(*a)  # else a property
        signature = arguments_of(self.raw) if hasattr(self.raw, "__nb_signature__") else []
        self.signature = signature[1:] if member == "__init__" else signature

    def call(self, arguments: list[Any], **expected: bool) -> None:
        """refused: it must raise; works: it must not. The call is printed on stderr before it happens."""
        said = f"{self.name}({', '.join(map(shown, arguments))})"
        sys.stderr.write(said + "\n")
        sys.stderr.flush()
        self.calls += 1
        signal.alarm(SECONDS)
        try:
            self.function(*arguments)
            if expected.get("refused"):
                self.problems.append(f"{said} is taken")
        except Exception as e:  # noqa: BLE001 - which one is the question
            if expected.get("works") or not isinstance(e, ALLOWED):
                self.problems.append(f"{said} raises {type(e).__name__}: {e}")
        finally:
            signal.alarm(0)
            if self.name == "Tape.__enter__" and arguments and isinstance(arguments[0], lib.Tape):
                with suppress(TypeError):  # of a tape that was not made
                    arguments[0].__exit__()

    def refused(self, i: int, sound: Any, value: Any) -> bool:
        """True for None where the argument is required, and for outputs that are not writable."""
        says = self.signature[i] if i < len(self.signature) else ""
        if value is None:
            return "None" not in says and "*args" not in self.signature
        if not isinstance(value, np.ndarray) or "ndarray" not in says or "writable=False" in says:
            return False
        sound = plain((sound,))[0]
        other = sound is not None and "dtype=" in says and value.dtype != sound.dtype
        return other or not value.flags.writeable or ("order='C'" in says and not value.flags.c_contiguous)


# Calls that no single change of a sound one gives: products that wrap around, and objects mutated during a call.
HUGE = (1 << 34, 1 << 32, 0, 32, 64, 32)
ALSO_REFUSED: dict[str, list[Callable[[], tuple[Any, ...]]]] = {
    "pack_tl": [lambda: (i8(0), u8(0), *HUGE)],
    "unpack_tl": [lambda: (u8(0), i8(0), *HUGE)],
    "PackedGroup.__init__": [lambda: ([packed()] * 65,), lambda: ((packed() for _ in range(3)),)],
}


def shown(x: Any) -> str:
    return f"{x.dtype}{x.shape}{x.strides}" if isinstance(x, np.ndarray) else repr(x)[:60]


def exercise(name: str) -> Binding:
    """Yield no arguments, one odd value for all, then valid calls with one, two or three arguments replaced."""
    b, rng = Binding(name), np.random.default_rng(5)
    for value in (*ANY, *handles(), np.empty(0, np.float32), np.empty((0, 0), np.float32), np.ones((2, 2), np.float32)):
        for count in range(len(b.signature) + 3):
            b.call([value] * count)
    for also in ALSO_REFUSED.get(name, ()):
        b.call(list(also()), refused=True)
    for sound in SOUND[name]:
        b.call(plain(sound()), works=True)
        kinds = sound()
        choices = [list(others(k)) for k in kinds]
        for i, kind in enumerate(kinds):
            for value in choices[i]:
                arguments = plain(sound())
                arguments[i] = value
                b.call(arguments, refused=b.refused(i, kind, value))
        for _ in range(MANY if len(kinds) > 1 else 0):
            arguments = plain(sound())
            for i in rng.choice(len(kinds), 2 if rng.integers(2) else min(3, len(kinds)), replace=False):
                arguments[i] = choices[i][rng.integers(len(choices[i]))]
            b.call(arguments)
    return b


def every_codec() -> Binding:
    """Blocks of random bytes and any weights, at the end of memory: no file content may cause a wild access."""
    from polyquant.registry import CODECS, codec

    b = Binding("dequantize")
    for name in CODECS:
        if not lib.has_packed(name):
            continue
        rows, cols = 12, 512
        spec = codec(name).specs((rows, cols))
        if set(spec) != {"blocks"}:
            continue
        size = int(np.prod(spec["blocks"].shape)) * spec["blocks"].dtype.itemsize
        for fill in (None, 0, 255, 127, 128):
            raw = u8(size) if fill is None else guarded(np.full(size, fill, np.uint8))
            b.function = lib.dequantize
            b.call([name, raw, f32(rows * cols)])
            b.function = lib.packed
            b.call([name, raw, rows, cols])
            for first, second in (("", "plain"), ("plain", "")):
                lib.use_kernels(first)
                with suppress(ValueError):  # lines of several rows: compared with their codec in test_packed
                    group = lib.PackedGroup([lib.packed(name, raw, rows, cols)])
                    b.function = group.multiply
                    for tokens in (1, 3, 9):
                        for how in range(4):
                            b.call([f32(tokens, cols), how, f32(tokens, rows)], works=True)
                            lib.use_kernels(second)
                            b.call([f32(tokens, cols), how, f32(tokens, rows)], works=True)
                            lib.use_kernels(first)
        b.function = lib.quantize
        for value in (0.0, np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-42, 1.0):
            for other in (value, 1.0, np.nan):
                w = f32(rows, cols)
                w[::2] = value
                w[:, ::3] = other
                for weights in (
                    None,
                    f32(cols),
                    guarded(np.full(cols, np.nan, np.float32)),
                    guarded(np.zeros(cols, np.float32)),
                ):
                    b.call([name, w, u8(rows, size // rows), weights])
    lib.use_kernels("")
    return b


def over_time() -> Binding:
    """Handles that hold the last reference to their arrays, objects made twice, tapes shared between threads."""
    b = Binding("lent")
    groups = [lib.PackedGroup([packed()]), lib.AffineGroup([affine()]), lib.TrellisGroup([trellis()])]
    noise = [f32(1000) for _ in range(100)]  # after releasing the first ones
    for group, cols, rows in zip(groups, (256, 64, 32), (8, 6, 48), strict=True):
        b.function = group.multiply
        b.call([f32(3, cols), 1, f32(3, rows)], works=True)
        b.function = group.__init__
        b.call([[None]], refused=True)
        b.call([[packed(64, 64)]])
        b.function = group.multiply
        b.call([f32(3, cols), 1, f32(3, rows)])
    del noise
    tape = lib.Tape()
    with tape:
        b.function = lib.lent
        for shape in ([1 << 32, 1 << 32], [1 << 63, 2], [1 << 62], [1 << 40, 2], [1 << 21] * 3):
            b.call([shape], refused=True)
        b.call([[0, 1 << 63]])
        b.call([[3, 4]], works=True)
        b.function = tape.run
        b.call([0], refused=True)
    b.function = tape.run
    b.call([0], works=True)
    b.call([1 << 63])
    threads_and_tapes(b)
    no_room_for_threads(b)
    return b


def no_room_for_threads(b: Binding) -> None:
    """If the system refuses a thread, the running ones are joined properly and the work is done."""
    group, x, y = lib.PackedGroup([packed(4096)]), f32(64, 256), f32(64, 4096)
    taken = Path("/proc/self/statm")
    if taken.exists() and not SANITIZED:
        room = int(taken.read_text().split()[0]) * resource.getpagesize() + (30 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (room, resource.getrlimit(resource.RLIMIT_AS)[1]))
    lib.set_threads(64)
    b.function = group.multiply
    b.call([x, 1, y], works=True)


def threads_and_tapes(b: Binding) -> None:
    """A tape is recorded by one thread: others neither end it, record it, run it, nor pull it from under it."""
    begun, ended = threading.Event(), threading.Event()
    tapes = [lib.Tape()]

    def record() -> None:
        tapes[0].__enter__()
        begun.set()
        ended.wait()
        lib.add(f32(3), f32(3), f32(3))

    thread = threading.Thread(target=record)
    thread.start()
    begun.wait()
    for function, arguments in ((tapes[0].__enter__, []), (tapes[0].run, [0])):
        b.function = function
        try:
            function(*arguments)
            b.problems.append(f"{function.__name__} of a tape that another thread records is taken")
        except (RuntimeError, ValueError):
            pass
        del function
    b.function = lib.get_threads
    tapes[0].__exit__()
    tapes[0] = lib.Tape()
    ended.set()
    thread.join()


def called(name: str) -> None:
    """In the fork: the calls, and one line of JSON about them."""
    if not SANITIZED:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    groups = {"every codec": every_codec, "over time": over_time}
    done = groups[name]() if name in groups else exercise(name)
    print(json.dumps({"calls": done.calls, "problems": done.problems[:20]}))


def forked(name: str) -> dict[str, object]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                called(name)
                code = 0
            except BaseException:  # noqa: BLE001 - the test sees it: code 70 and the traceback
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        texts = []
        for f in (out, err):
            f.seek(0)
            texts.append(f.read().decode())
    return {"code": os.waitstatus_to_exitcode(status), "out": texts[0], "err": texts[1][-4000:]}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(forked(line.strip())), flush=True)
