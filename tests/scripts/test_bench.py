"""The instrument: comparing two files of figures, noise, and peers that are programs."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch):
    """Imports a module of bench/, under its own name only while the test runs."""
    monkeypatch.syspath_prepend(BENCH)

    def load(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = import_module(name)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return load


def figures(*rows, peer="1.0", **machine):
    listed = [
        {"name": name, "ours": ours, "ratio": ratio, "more": more, "noise": noise}
        for name, ours, ratio, more, noise in rows
    ]
    machine = {"engine": "AVX2", "processor": "A", "machine": "x86_64", "cores": 2, **machine}
    return {"machine": machine, "sections": {"Run": {"section": "run", "peers": {"llama.cpp": peer}, "rows": listed}}}


def checked(bench, tmp_path, monkeypatch, capsys, old, new):
    """Status and lines of bench-check."""
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, found in zip(paths, (old, new), strict=True):
        path.write_text(found if isinstance(found, str) else json.dumps(found), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["check.py", *map(str, paths)])
    status = bench("check").main()
    printed = capsys.readouterr()
    return status, printed.out.splitlines(), printed.err


def test_changes_beyond_noise_are_listed(bench, tmp_path, monkeypatch, capsys):
    old = figures(
        ("decode", 10.0, 1.0, True, 0.01), ("load", 2.0, None, False, 0.01), ("prefill", 50.0, 2.0, True, 0.01),
        ("noisy", 10.0, 1.0, True, 0.3), ("once", 10.0, None, True, None), ("gone", 1.0, None, True, 0.0),
    )  # fmt: skip
    new = figures(
        ("decode", 20.0, 0.8, True, 0.01), ("load", 1.0, None, False, 0.01), ("prefill", 9.0, 2.05, True, 0.01),
        ("noisy", 10.0, 0.7, True, 0.1), ("once", 8.5, None, True, 0.0), ("new", 1.0, None, True, 0.0),
    )  # fmt: skip
    status, lines, _ = checked(bench, tmp_path, monkeypatch, capsys, old, new)
    assert status == 1
    assert lines == [
        "slower: run: decode: 0.8 times (ratio to the peer, noise 5%)",
        "faster: run: load: 2 times (own value, noise 5%)",
        "missing: run: gone",
        "5 rows compared: 1 slower, 1 faster, 1 missing",
    ]
    assert checked(bench, tmp_path, monkeypatch, capsys, new, new)[0] == 0


@pytest.mark.parametrize("machine", [{"engine": "AVX-512 VNNI"}, {"processor": "B"}, {"cores": 8}])
def test_other_machines_compare_ratios_only(machine, bench, tmp_path, monkeypatch, capsys):
    old = figures(("decode", 10.0, 1.0, True, 0.0), ("load", 2.0, None, False, 0.0))
    new = figures(("decode", 1.0, 1.0, True, 0.0), ("load", 9.0, None, False, 0.0), **machine)
    status, lines, _ = checked(bench, tmp_path, monkeypatch, capsys, old, new)
    key, value = next(iter(machine.items()))
    assert status == 0
    assert lines[0].startswith(f"differs: {key} ") and lines[0].endswith(f"now {value}")
    assert lines[1].startswith("1 rows compared: 0 slower") and "1 not comparable" in lines[1]
    new = figures(("decode", 5.0, 0.5, True, 0.0), ("load", 2.0, None, False, 0.0), peer="2.0")
    status, lines, _ = checked(bench, tmp_path, monkeypatch, capsys, old, new)
    assert status == 1 and lines[0] == "slower: run: decode: 0.5 times (own value, noise 5%)"  # another peer


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "no JSON"), ("[]", "no figures"), ('{"machine": {}, "sections": {"a": {"section": "a", "peers": {}, "rows": '
     '[{"name": "x"}]}}}', "earlier version")],
)  # fmt: skip
def test_files_without_figures_are_one_line(text, problem, bench, tmp_path, monkeypatch, capsys):
    status, lines, said = checked(bench, tmp_path, monkeypatch, capsys, text, figures())
    assert (status, lines) == (2, []) and problem in said and said.count("\n") == 1


def test_noise_is_that_of_the_medians_since_the_last_row(bench):
    measure = bench("measure")
    assert measure.middle([1.0, 2.0, 3.0]) == 2 and measure.middle([5.0]) == 5
    assert measure.noise() == pytest.approx(0.25) and measure.noise() is None


def test_a_llama_bench_stands_in_for_the_library(bench, tmp_path, monkeypatch):
    peers = bench("peers")
    script = tmp_path / "llama-bench"
    script.write_text(
        '#!/bin/sh\n[ "$2" = bad.gguf ] && echo "cannot load" >&2 && exit 1\n'
        """echo '[{"n_prompt": 512, "n_gen": 0, "avg_ts": 99.5}, {"n_prompt": 0, "n_gen": 24, "avg_ts": 12.25}]'\n"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    monkeypatch.delenv("IK_LLAMA_CPP", raising=False)
    assert peers.program("llama.cpp") == script and peers.program("ik_llama.cpp") is None
    assert peers.release("llama.cpp") == f"llama-bench in {tmp_path}" and peers.release("no-such-package") is None
    assert peers.llama_bench(script, Path("m.gguf"), 2, 512, 24) == {"prefill": 99.5, "decode": 12.25}
    with pytest.raises(RuntimeError, match="cannot load"):
        peers.llama_bench(script, Path("bad.gguf"), 2, 0, 24)
    script.write_text("#!/bin/sh\necho no\n")
    with pytest.raises(RuntimeError, match="printed no figures"):
        peers.llama_bench(script, Path("m.gguf"), 2, 0, 24)


def test_figures_stay_when_a_later_section_fails(bench, tmp_path, monkeypatch, capsys):
    run, out = bench("run"), tmp_path / "bench.json"
    fails = "subprocess.run([sys.executable, '-c', 'exit(chr(110) + chr(111))'], capture_output=True, check=True)"
    for name, body in (("good", "yield Row('a row', 's', 1.0)"), ("bad", f"yield {fails}")):
        lines = ["import subprocess, sys", "from measure import Row, Section", "def rows():", f"    {body}"]
        (tmp_path / f"bench_{name}.py").write_text("\n".join([*lines, f"SECTION = Section('{name}', rows)"]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(run, "NAMES", ["bad", "good"])
    monkeypatch.setattr(sys, "argv", ["run.py", "--json", str(out), "--markdown", str(tmp_path / "page.md")])
    assert run.main() == 1
    assert [found["section"] for found in json.loads(out.read_text())["sections"].values()] == ["good"]
    assert not (tmp_path / "page.md").exists()
    said = capsys.readouterr().err.splitlines()
    assert "bad: not measured, because a command failed: no" in said
    assert said[-1] == f"to measure only these: bench/run.py bad --add {out}"
