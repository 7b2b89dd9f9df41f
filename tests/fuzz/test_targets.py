"""The short form of `make fuzz`: seeds, inputs that failed once, and some mutations, in a process with limits."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

import polyquant
from fuzz import mutators
from fuzz.run import inputs
from fuzz.targets import TARGETS

SHORT, LONG = 250, 20_000
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parents[1], Path(polyquant.__file__).resolve().parents[1]))),
}


SERVER = """
import json, os, sys, tempfile, traceback
from fuzz import run, targets
from fuzz.targets import TARGETS
for line in sys.stdin:
    name, runs, folder = json.loads(line)
    with tempfile.TemporaryFile("w+") as output:
        if (pid := os.fork()) == 0:
            code = 1
            try:
                os.dup2(output.fileno(), 2)
                os.chdir(folder)
                done, accepted = run.plain(name, runs, 1)
                print(done, accepted, file=output, flush=True)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        print(json.dumps([code, output.read()]), flush=True)
"""
"""Forks for each line of stdin: the modules are imported once."""


@pytest.fixture(scope="module")
def run():
    """Executions and accepted inputs of one target."""
    child = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )

    def call(name, runs, folder):
        child.stdin.write(json.dumps([name, runs, str(folder)]) + "\n")
        child.stdin.flush()
        assert select.select([child.stdout], [], [], 500)[0], "hangs"
        code, output = json.loads(child.stdout.readline())
        assert code == 0, output[-3000:]
        done, accepted = output.split()[-2:]
        return int(done), int(accepted)

    yield call
    child.kill()
    child.communicate()


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_input_is_read_or_refused(name, run, tmp_path):
    executions, accepted = run(name, SHORT, tmp_path)
    assert executions >= SHORT and 0 < accepted < executions


def test_the_program(tmp_path):
    command = [sys.executable, "-m", "fuzz.run", "--plain", "--runs", "9", "config"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[1]) >= 9


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_mutated_input_is_read_or_refused_for_longer(name, run, tmp_path):
    assert run(name, LONG, tmp_path)[0] >= LONG


def test_a_finding_is_reported_with_its_input(tmp_path):
    """A target that raises ends the run and leaves the input."""
    code = (
        "from fuzz import run, targets\n"
        "def fail(data, folder): assert b'b' not in data; return True\n"
        "targets.TARGETS['x'] = targets.Target(lambda: [b'a'], fail, lambda data, rng: b'ab')\n"
        "run.plain('x', 3, 1)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path, timeout=60, check=False
    )
    assert done.returncode == 1 and "its input is in" in done.stderr
    assert (tmp_path / "failed-x").read_bytes() == b"ab"


@pytest.mark.parametrize("name", ["gguf", "vocabulary", "importance"])
def test_the_gguf_mutator_parses_the_seeds_and_writes_them_again(name):
    for seed in inputs(name, TARGETS[name])[:1]:
        order, version, entries, tensors, rest = mutators.parsed(seed)
        fields = b"".join(mutators.packed(field, order) for item in (*entries, *tensors) for field in item)
        assert seed[24:].startswith(fields) and (not rest or seed.endswith(rest)) and version in (2, 3)


def test_a_seed_gives_the_same_mutations():
    for target in TARGETS.values():
        seed = target.seeds()[0]
        assert target.mutate(seed, Random(7)) == target.mutate(seed, Random(7))
