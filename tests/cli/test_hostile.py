"""Every case of the hostile corpus gives the answer in its manifest, under 2 s and 300 MB."""

import json
import subprocess
import sys

import pytest

from cli.hostile import CASES, MANIFEST, arguments, message
from cli.test_streams_and_names import ENVIRONMENT

EXPECTED = json.loads(MANIFEST.read_text(encoding="utf-8"))


def test_the_manifest_lists_every_case():
    assert EXPECTED.keys() == CASES.keys() and len(CASES) >= 200


@pytest.mark.parametrize("case", CASES)
def test_hostile_input_is_answered_as_the_manifest_says(case, polyquant, tmp_path):
    (tmp_path / "in").mkdir()
    path = CASES[case](tmp_path / "in")
    for verb, (code, text) in EXPECTED[case].items():
        outcome = polyquant(*arguments(verb, path, tmp_path))
        assert outcome.code == code and code in (0, 1, 2) and "Traceback" not in outcome.err, outcome
        assert message(outcome) == text
        assert outcome.cpu < 2 and outcome.rss < 300e6, outcome


PROCESS = """
import json, pathlib, resource, runpy, sys
resource.setrlimit(resource.RLIMIT_CPU, (4, 4))
report = pathlib.Path(sys.argv.pop(1))
sys.argv[0] = 'polyquant'
try:
    runpy.run_module('polyquant', run_name='__main__')
finally:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    status = dict(line.split(':', 1) for line in pathlib.Path('/proc/self/status').read_text().splitlines())
    peak = int(status['VmHWM'].split()[0]) * 1024  # ru_maxrss includes the process that started this one
    report.write_text(json.dumps([sum(u.ru_utime + u.ru_stime for u in used), peak]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("case", CASES)
def test_as_a_real_process(case, tmp_path):
    """The whole process, with the interpreter and all imports, under 2 s of processor time and 300 MB."""
    (tmp_path / "in").mkdir()
    path = CASES[case](tmp_path / "in")
    report = tmp_path / "report"
    for verb, (expected, _) in EXPECTED[case].items():
        words = [sys.executable, "-c", PROCESS, report, *map(str, arguments(verb, path, tmp_path))]
        done = subprocess.run(words, capture_output=True, timeout=60, env=ENVIRONMENT, check=False)
        assert done.returncode == expected and b"Traceback" not in done.stderr, done
        seconds, peak = json.loads(report.read_text())
        assert seconds < 2 and peak < 300e6, (seconds, peak)
