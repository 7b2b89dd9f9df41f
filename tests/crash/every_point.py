"""Disturbs a job at each of its calls that change the file system, checks the files, and runs the job again.

    every_point.py                      a table of all jobs and disturbances: some thousand runs, an hour
    every_point.py split,edit kill,half 1
    every_point.py trellis random 100   kills at random moments
    every_point.py trellis power 1      loses power after each operation (power.py)
    every_point.py --serve              answers lines of JSON on stdin: {"verb": "split", "how": ["kill"], "every": 5}

It imports the program once and forks a child per run. An answer has the changing calls of an undisturbed run and its
process, the number of disturbed runs, and complaints. every: disturb each n-th call only, or kill n times.
Disturbances: see changes.py; jobs: verbs.py.
"""

from __future__ import annotations

import gc
import io
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.dont_write_bytecode = True
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: threads do not survive a fork

from cli.child import warm  # noqa: E402 - after the path
from crash.changes import DISTURBANCES, KILLS, SYNCS, Call, Changes  # noqa: E402
from crash.power import Disk, Operation, Recording, State  # noqa: E402
from crash.verbs import FOREIGN, UNSYNCED, VERBS, Files, Job, Verb, make_inputs  # noqa: E402
from polyquant.errors import PolyquantError  # noqa: E402
from polyquant.storage import work_folder  # noqa: E402

_SHOWN = 5
_STATES = 20
"""Random states after each power loss, and two more."""


@dataclass(frozen=True, slots=True)
class Run:
    """The end of a child: exit code, negative for a signal; stderr; its changing calls if it was not killed."""

    pid: int
    code: int
    err: str
    calls: tuple[Call, ...] = ()


def contents(folder: Path, *, work: bool) -> Files:
    """All files below a folder; work: also those in work folders, and these folders themselves."""
    out = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not _unfinished(name) or work:
            out |= {name: path.read_bytes()} if path.is_file() else {} if any(path.iterdir()) else {f"{name}/": b""}
    return out


def _unfinished(name: str) -> bool:
    before, mark, after = name.partition(".polyquant-")
    folder = before + mark + after.partition("/")[0]
    return bool(mark) and not any(f.startswith(f"{folder}/") for f in FOREIGN)


class Tester:
    """Runs one job. room: an empty folder for it; inputs: of `make_inputs`."""

    def __init__(self, verb: Verb, room: Path, inputs: Path) -> None:
        self.verb, self.top, self.inputs = verb, room / "top", inputs
        self._streams, self._old = room / "streams", room / "old"
        self._streams.mkdir()
        self.top.mkdir()
        for name, data in FOREIGN.items():
            (self.top / name).parent.mkdir(exist_ok=True)
            (self.top / name).write_bytes(data)
        if verb.old is not None:
            made = self.run(None, verb.old)
            assert made.code == 0, made.err
        shutil.copytree(self.top, self._old)
        self.old = contents(self.top, work=True)
        done = self.run(Changes())
        assert done.code == 0, done.err
        self.new = contents(self.top, work=True)
        assert self.new != self.old
        self.calls, self.undisturbed = done.calls, done

    def reset(self) -> None:
        """Restore the folder as before the first run."""
        shutil.rmtree(self.top)
        shutil.copytree(self._old, self.top)

    def run(
        self,
        changes: Changes | None,
        job: Job | None = None,
        *,
        seconds: float | None = None,
        inodes: dict[int, int] | None = None,
    ) -> Run:
        """Run a job, by default the one under test, in a forked child, and kill it after some seconds.

        changes: None: neither counted nor disturbed, and with threads. inodes: those of files that were written again
        -> those before, which a journal names.
        """
        pid = os.fork()
        if pid == 0:
            if inodes is not None:
                _rename_inodes(inodes)
            self._child(changes, job or self.verb.job)
        if seconds is not None:
            time.sleep(seconds)
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        err = (self._streams / "2").read_text()
        done = json.loads((self._streams / "calls").read_text() or "[]")
        return Run(pid, code, err, tuple(Call(**c) for c in done))

    def _child(self, changes: Changes | None, job: Job) -> None:
        code = 70
        try:
            for stream in (1, 2):
                os.dup2(os.open(self._streams / str(stream), os.O_CREAT | os.O_TRUNC | os.O_WRONLY), stream)
            calls, operations = (
                os.open(self._streams / name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY) for name in ("calls", "operations")
            )
            write = os.write
            self.verb.system()
            if changes is not None:
                changes.arm()
            code = _called(job, self.top, self.inputs)
            write(calls, json.dumps([asdict(c) for c in (changes.calls if changes is not None else ())]).encode())
            if isinstance(changes, Recording):
                write(operations, pickle.dumps(changes.operations))
        except BaseException:  # noqa: BLE001 - code 70 and the traceback are a failure of the check
            traceback.print_exc()
            code = 70
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def check(self, n: int, how: str) -> Iterator[str]:
        """Disturb the n-th call and yield complaints."""
        self.reset()
        killed = how in KILLS
        done = self.run(Changes(n, "half" if how == "twice" else how))
        if how == "twice":
            done = self._killed_again(n) or done
        if done.code not in ((-signal.SIGKILL,) if killed else (0, 1, 2)) or "Traceback" in done.err:
            yield f"ended with code {done.code}: {done.err[-2000:]}"
            return
        seen = contents(self.top, work=False)
        yield from self._mixed(seen)
        if not killed:
            yield from self._said(done, seen)
        yield from self._next_run(seen)

    def _mixed(self, seen: Files) -> Iterator[str]:
        """Yield a complaint unless the content is the old or the new one."""
        if seen not in (self.old, self.new) and not self.verb.partly(seen):
            yield f"neither old nor new: {_difference(seen, self.old)}; {_difference(seen, self.new)}"

    def _next_run(self, seen: Files, inodes: dict[int, int] | None = None) -> Iterator[str]:
        """Run the job again, and yield complaints. seen: the content before; inodes: see `run`."""
        again = self.run(Changes(), inodes=inodes)
        finished = seen == self.new and self.verb.old is None and again.code == 2 and "target exists" in again.err
        if again.code != 0 and not finished:
            yield f"the next run ended with code {again.code}: {again.err[-2000:]}"
        if (left := contents(self.top, work=True)) != self.new:
            yield f"after the next run: {_difference(left, self.new)}"

    def kill_at_random(self, kills: int, seed: int) -> tuple[int, list[str]]:
        """Kill runs on two threads at random moments. Returns the number of kills that came in time, and complaints."""
        rng, wrong, killed = random.Random(seed), [], 0
        job = self.verb.job
        if isinstance(job, tuple):
            job = tuple("2" if before == "--threads" else word for before, word in pairwise(("", *job)))
        self.reset()
        started = time.monotonic()
        assert self.run(None, job).code == 0
        whole = time.monotonic() - started
        while killed < kills:
            self.reset()
            seconds = rng.uniform(0, whole)
            killed += self.run(None, job, seconds=seconds).code == -signal.SIGKILL
            seen = contents(self.top, work=False)
            wrong += [f"after {seconds:.3f} s: {what}" for what in (*self._mixed(seen), *self._next_run(seen))]
        return killed, wrong

    def operations(self, inodes: dict[int, int] | None = None) -> list[Operation]:
        """Run the job and return its operations below the folder. inodes: see `run`."""
        done = self.run(Recording(self.top), inodes=inodes)
        assert done.code == 0 or "target exists" in done.err, done.err
        return list(pickle.loads((self._streams / "operations").read_bytes()))

    def lose_power(self, every: int) -> tuple[int, list[str]]:
        """Lose power after each `every`-th operation of a run, and of some runs after a kill.

        Returns the number of states, and complaints.
        """
        self.reset()
        disk = Disk(self.old, atomic=self.verb.atomic)
        operations = self.operations()
        tried, wrong = self._losses(deepcopy(disk), operations, every)
        kills = {*range(0, len(operations), max(3 * every, len(operations) // 4)), *range(len(operations))[-9::every]}
        for n, operation in enumerate(operations):
            if n in kills:
                killed = deepcopy(disk)
                more, said = self._losses(killed, self.operations(self._rebuild(killed.now())), 4 * every)
                tried += more
                wrong += [f"killed before {operation.kind} {operation.path}: {what}" for what in said]
            disk.apply(operation)
        return tried, wrong

    def _losses(self, disk: Disk, operations: list[Operation], every: int) -> tuple[int, list[str]]:
        wrong, known = [], set()
        for n in range(len(operations) + 1):
            for state in disk.states(random.Random(n), _STATES) if n % every == 0 or n == len(operations) else ():
                if state.key() not in known:
                    known.add(state.key())
                    inodes = self._rebuild(state)
                    seen = contents(self.top, work=False)
                    said = [*self._mixed(seen), *self._next_run(seen, inodes)]
                    if n == len(operations) and seen != self.new:
                        said.append(f"a complete run is lost: {_difference(seen, self.new)}")
                    wrong += [f"power loss after operation {n}, {_brief(operations[:n])}: {what}" for what in said]
            if n < len(operations):
                disk.apply(operations[n])
        return len(known), wrong

    def _rebuild(self, state: State) -> dict[int, int]:
        """Write this content. Returns its inodes -> those before."""
        shutil.rmtree(self.top)
        self.top.mkdir()
        return state.build(self.top)

    def _killed_again(self, n: int) -> Run | None:
        """Kill the next run too, at a call that depends on n. None if it ended before that."""
        again = self.run(Changes((37 * n + 11) % len(self.calls), "half"))
        return again if again.code not in (0, 2) else None

    def _said(self, done: Run, seen: Files) -> Iterator[str]:
        """Yield complaints about a run that met an error."""
        if done.code == 0 and seen != self.new:
            yield "ended with code 0, without the new content"
        *notes, last = done.err.splitlines() or [""]
        if done.code and (not last.startswith("polyquant: ") or not all(n.startswith("note: ") for n in notes)):
            yield f"not one line: {done.err}"
        if done.code and str(self.top) not in last:
            yield f"no file is named: {last}"
        left = [p.name for p in self.top.rglob("*.polyquant-*") if _unfinished(p.relative_to(self.top).as_posix())]
        if done.code and not all(name in last for name in left):
            yield f"{left} remains, and the error does not tell: {last}"


def _rename_inodes(inodes: dict[int, int]) -> None:
    """In a child: show files that were written again with the inodes that they had before."""
    real = work_folder._inode

    def inode(path: Path) -> int | None:
        found = real(path)
        return None if found is None else inodes.get(found, found)

    work_folder._inode = inode


def _brief(operations: list[Operation]) -> str:
    last = operations[-1] if operations else Operation("none", "")
    return " ".join(filter(None, (last.kind, last.path, last.other)))


def _called(job: Job, top: Path, inputs: Path) -> int:
    """Run a job; its exit code. Errors of a function are printed as the command line does."""
    from polyquant.cli import main

    if isinstance(job, tuple):
        words = [w.replace("{top}", str(top)).replace("{in}", str(inputs)) for w in job]
        try:
            main(words)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 0
        return 0
    try:
        job(top, inputs)
    except (PolyquantError, OSError) as problem:
        notes = [*getattr(problem, "__notes__", ()), *getattr(problem.__cause__, "__notes__", ())]
        print("; ".join([f"polyquant: {problem}", *notes]), file=sys.stderr)
        return 2 if isinstance(problem, PolyquantError) else 1
    return 0


def _difference(found: Files, wanted: Files) -> str:
    changed = [n for n in found if n in wanted and found[n] != wanted[n]]
    return f"more {sorted(found.keys() - wanted.keys())}, less {sorted(wanted.keys() - found.keys())}, other {changed}"


def points(verb: Verb, calls: tuple[Call, ...], how: list[str], every: int) -> Iterator[tuple[int, str]]:
    """Yield (call, disturbance)."""
    for kind in how:
        able = [n for n, c in enumerate(calls) if kind != "half" or (c.nbytes > 1 and not verb.atomic)]
        if kind == "kill":  # a kill after fsync leaves what a kill before it does
            able = [n for n in able if n == 0 or calls[n - 1].name not in SYNCS]
        for n in able[DISTURBANCES.index(kind) * 7 % min(every, len(able) or 1) :: every]:
            yield n, kind


@dataclass(frozen=True, slots=True)
class Answer:
    """The names of the changing calls of an undisturbed run, its folder and process; disturbed runs; complaints."""

    calls: tuple[str, ...]
    top: str
    pid: int
    tried: int
    wrong: tuple[str, ...]


def answer(name: str, how: list[str], every: int, room: Path, inputs: Path) -> Answer:
    """Test one job. how: ["random"]: `every` kills at random moments; ["power"]: power losses."""
    tester = Tester((VERBS | UNSYNCED)[name], room, inputs)
    if how == ["random"]:
        killed, wrong = tester.kill_at_random(every, seed=sum(name.encode()))
        return Answer((), str(tester.top), tester.undisturbed.pid, killed, tuple(wrong))
    if how == ["power"]:
        tried, wrong = tester.lose_power(every)
        calls = tuple(c.name for c in tester.calls)
        return Answer(calls, str(tester.top), tester.undisturbed.pid, tried, tuple(f"{name}: {w}" for w in wrong))
    wrong, tried = [], 0
    for n, kind in points(tester.verb, tester.calls, how, every):
        tried += 1
        wrong += [f"{name}: {kind} at call {n}, {tester.calls[n]}: {what}" for what in tester.check(n, kind)]
    tester.reset()
    short = tester.run(Changes(how="short"))
    if short.code != 0 or contents(tester.top, work=True) != tester.new:
        wrong.append(f"{name}: writes of half the bytes: code {short.code}: {short.err[-2000:]}")
    return Answer(tuple(c.name for c in tester.calls), str(tester.top), tester.undisturbed.pid, tried, tuple(wrong))


def _run_once(top: Path, inputs: Path) -> None:
    """Run some jobs here, so that forks find what a first run of each computes and keeps."""
    top.mkdir()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        for name in ("gguf", "edit", "embed", "checksum", "importance", "repair", "save-folder"):
            assert _called(VERBS[name].job, top, inputs) == 0
    shutil.rmtree(top)


@contextmanager
def answering() -> Iterator[Callable[[str, list[str], int], Answer]]:
    """Import everything and yield a function that tests one job."""
    warm()
    memory = Path("/dev/shm")  # where fsync takes no time
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        folder = Path(name)
        make_inputs(folder / "inputs")
        _run_once(folder / "once", folder / "inputs")
        gc.collect()
        gc.freeze()
        rooms = itertools.count()

        def ask(verb: str, how: list[str], every: int) -> Answer:
            room = folder / str(next(rooms))
            room.mkdir()
            try:
                return answer(verb, how, every, room, folder / "inputs")
            finally:
                shutil.rmtree(room)

        yield ask


def serve() -> None:
    """Answer lines of stdin."""
    with answering() as ask:
        for line in sys.stdin:
            print(json.dumps(asdict(ask(**json.loads(line)))), flush=True)


def table(verbs: list[str], how: list[str], every: int) -> None:
    """Print the counts of these jobs."""
    total, tried, wrong = 0, 0, 0
    with answering() as ask:
        for verb in verbs:
            started = time.monotonic()
            got = ask(verb, how, every)
            total, tried, wrong = total + len(got.calls), tried + got.tried, wrong + len(got.wrong)
            seconds = time.monotonic() - started
            print(f"{verb:24} {len(got.calls):5} calls {got.tried:6} runs {len(got.wrong):4} wrong {seconds:7.1f} s")
            for what in got.wrong[:_SHOWN]:
                print(f"    {what}")
            sys.stdout.flush()
    print(f"{'':24} {total:5} calls {tried:6} runs {wrong:4} wrong")


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        names, disturbances, every = (*sys.argv[1:], *("all", "all", "1")[len(sys.argv) - 1 :])
        table(
            list(VERBS) if names == "all" else names.split(","),
            list(DISTURBANCES) if disturbances == "all" else disturbances.split(","),
            int(every),
        )
