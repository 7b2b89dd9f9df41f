"""Conversions in parts: any order, twice, at once, on several machines; the merged bytes are those of one run."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

import polyquant as pq
from conversion import jobs
from conversion.jobs import SOURCE, content
from polyquant.conversion import tasks
from polyquant.conversion.merge import discard_parts
from polyquant.conversion.tasks import Part, cost, parse_part, shares
from polyquant.errors import InputError, PlanError
from polyquant.storage import parts as storage_parts
from polyquant.types import as_matrix

JOBS = {
    **jobs.JOBS,
    "split": ("out.gguf", {"codec": "q8_0", "shard_bytes": 150_000}),
    "hf": ("out", {"to": "hf"}),
}


def whole(folder: Path, job: str) -> dict[str, bytes]:
    """The files of a run on one machine."""
    name, options = JOBS[job]
    folder.mkdir()
    pq.convert(SOURCE, folder / name, **options)
    return content(folder)


def run(folder: Path, job: str, *parts: str, source: Path = SOURCE, **more) -> Path:
    folder.mkdir(exist_ok=True)
    name, options = JOBS[job]
    for part in parts:
        pq.convert(source, folder / name, **{**options, **more}, part=part)
    return folder / name


@pytest.mark.parametrize("job", JOBS)
def test_merged_parts_are_the_bytes_of_one_run(job, tmp_path):
    target = run(tmp_path / "parts", job, "3/3", "1/3", "2/3", "1/3")
    assert not target.exists()
    report = pq.merge(target, verify=True)
    assert content(tmp_path / "parts") == whole(tmp_path / "whole", job)
    assert [s.tensor for s in report.steps] == [
        s.map.target for s in pq.plan(SOURCE, JOBS[job][1].get("to", "gguf"), **without(JOBS[job][1])).steps
    ]


def without(options):
    return {k: v for k, v in options.items() if k != "to"}


@pytest.mark.parametrize("count", [1, 7, 40])
def test_any_number_of_parts(count, tmp_path):
    target = run(tmp_path / "parts", "gguf", *(f"{i}/{count}" for i in range(1, count + 1)))
    report = pq.merge(target)
    assert content(tmp_path / "parts") == whole(tmp_path / "whole", "gguf")
    one = pq.convert(SOURCE, tmp_path / "again.gguf", **JOBS["gguf"][1])
    assert report.error.snr == pytest.approx(one.error.snr, abs=1e-9) and report.nbytes == one.nbytes


def test_parts_run_at_once_and_twice(tmp_path):
    errors = []

    def part(i):
        try:
            run(tmp_path / "parts", "gguf", f"{i}/4")
        except Exception as e:  # noqa: BLE001 - the test shows it
            errors.append(e)

    (tmp_path / "parts").mkdir()
    threads = [threading.Thread(target=part, args=(1 + i % 4,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    pq.merge(tmp_path / "parts/out.gguf", verify=True)
    assert content(tmp_path / "parts") == whole(tmp_path / "whole", "gguf")


@pytest.mark.parametrize("job", ["gguf", "sharded"])
def test_parts_of_machines_without_a_shared_folder(job, tmp_path):
    for i in (1, 2, 3):
        run(tmp_path / f"machine{i}", job, f"{i}/3")
    target = run(tmp_path / "parts", job, "2/3")
    with pytest.raises(PlanError, match="part 3 of 3 was not run"):
        pq.merge(target, [tmp_path / "machine1"])
    pq.merge(target, [tmp_path / "machine3", tmp_path / "machine2"], verify=True)
    assert content(tmp_path / "parts") == whole(tmp_path / "whole", job)


def test_copies_of_the_source_need_a_flag(tmp_path):
    copy = Path(shutil.copytree(SOURCE, tmp_path / "hf"))
    run(tmp_path / "parts", "gguf", "1/2", source=copy)
    os.utime(copy / "model.safetensors", (1, 1))
    target = run(tmp_path / "parts", "gguf", "2/2", source=copy)
    with pytest.raises(PlanError, match=r"source changed between part 1 and part 2.*1970.*--allow-copies"):
        pq.merge(target)
    pq.merge(target, allow_copies=True)


def test_a_changed_source_makes_another_job(tmp_path):
    copy = Path(shutil.copytree(SOURCE, tmp_path / "hf"))
    target = run(tmp_path / "parts", "gguf", "1/2", source=copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    with pytest.raises(PlanError, match=r"parts of another job wait.*polyquant merge out.gguf"):
        run(tmp_path / "parts", "gguf", "2/2", source=copy)
    with pytest.raises(PlanError, match="parts of a job wait"):
        pq.convert(SOURCE, target)
    discard_parts(target)
    assert not list((tmp_path / "parts").iterdir())


def test_missing_parts_are_named_with_a_command(tmp_path):
    with pytest.raises(PlanError, match="no parts to merge"):
        pq.merge(tmp_path / "out.gguf")
    target = run(tmp_path / "parts", "gguf", "2/4", command="polyquant convert A out.gguf --part {part}")
    with pytest.raises(PlanError, match=r"3 of 4 parts are missing: 1, 3, 4; polyquant convert A out.gguf --part 1/4"):
        pq.merge(target)
    with pytest.raises(PlanError, match=r"another number \(expected --part I/4, found I/3\)"):
        run(tmp_path / "parts", "gguf", "1/3")


def test_parts_of_another_version_are_refused(tmp_path, monkeypatch):
    run(tmp_path / "parts", "gguf", "1/2")
    monkeypatch.setattr("polyquant.conversion.parts.__version__", "9.9")
    with pytest.raises(PlanError, match="made by another version"):
        run(tmp_path / "parts", "gguf", "2/2")


def test_a_running_part_is_not_merged(tmp_path):
    target = run(tmp_path / "parts", "gguf", "1/1")
    plan = pq.plan(SOURCE, "gguf", **JOBS["gguf"][1])
    from polyquant.conversion.parts import job_of
    from polyquant.conversion.steps import with_name

    with (
        storage_parts.joined(target, job_of(with_name(plan, target), 1, "")),
        pytest.raises(PlanError, match="still being written"),
    ):
        pq.merge(target)
    pq.merge(target)


def test_damaged_bytes_are_found(tmp_path):
    target = run(tmp_path / "parts", "gguf", "1/2", "2/2")
    (folder,) = (tmp_path / "parts").iterdir()
    path = folder / "files/out.gguf"
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="does not hold what part"):
        pq.merge(target, verify=True)
    data[-40] ^= 1
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="headers are damaged"):
        pq.merge(target)
    run(tmp_path / "parts", "gguf", "1/2")
    pq.merge(target, verify=True)
    assert content(tmp_path / "parts") == whole(tmp_path / "whole", "gguf")


def test_a_damaged_part_is_recomputed(tmp_path):
    target = run(tmp_path / "parts", "gguf", "1/2", "2/2")
    (folder,) = (tmp_path / "parts").iterdir()
    path = folder / "files/out.gguf"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(PlanError, match="another program changed it"):
        pq.merge(target)
    run(tmp_path / "parts", "gguf", "1/2", "2/2")
    pq.merge(target, verify=True)
    assert content(tmp_path / "parts") == whole(tmp_path / "whole", "gguf")


@pytest.mark.parametrize("seed", range(30))
def test_invalid_receipts_of_other_machines_are_refused(seed, tmp_path):
    """Receipts with valid checksums and invalid values: no file outside the folder is touched."""
    rng = np.random.default_rng(seed)
    run(tmp_path / "machine", "gguf", "1/1")
    (folder,) = (tmp_path / "machine").iterdir()
    name = "journal" if seed % 2 else "part-1-of-1"
    lines = [json.loads(line[9:]) for line in (folder / name).read_bytes().splitlines()]
    entry = lines[0] if name == "journal" else lines[int(rng.integers(len(lines)))]
    spoil(entry, rng)
    texts = [json.dumps(line).encode() for line in lines]
    (folder / name).write_bytes(b"".join(b"%08x %s\n" % (zlib.crc32(text), text) for text in texts))
    (tmp_path / "parts").mkdir()
    try:
        pq.merge(tmp_path / "parts/out.gguf", [tmp_path / "machine"])
    except (PlanError, InputError) as problem:
        assert "\n" not in str(problem)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["machine", "parts"]


def spoil(value, rng):
    """Replace one value somewhere inside."""
    odd = [None, -1, 1 << 70, "../../x", "", [], {}, 1.5, True, ["/etc/x"], "a\0b"]
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[int(rng.integers(len(keys)))]
    if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.7:
        spoil(value[key], rng)
    else:
        value[key] = odd[int(rng.integers(len(odd)))]


def test_shares_have_equal_cost_and_cover_every_row():
    plan = pq.plan(SOURCE, "gguf", recipe="q4_k_m")
    for count in (1, 2, 5, 64):
        parts = shares(plan, count)
        assert len(parts) == count
        rows = {s.map.target: 0 for s in plan.steps}
        for task in (t for part in parts for t in part):
            n = as_matrix(task.step.map.shape)[0]
            assert task.rows is None or task.rows.start == (rows[task.step.map.target])
            rows[task.step.map.target] += n if task.rows is None else task.rows.stop - task.rows.start
        assert rows == {s.map.target: as_matrix(s.map.shape)[0] for s in plan.steps}


def test_a_large_matrix_is_divided(tmp_path):
    """Rows of one matrix go to several parts, at blocks of the same rows as in one run."""
    rng = np.random.default_rng(1)
    pq.save({"a.weight": rng.normal(size=(3000, 1024)).astype(np.float32)}, tmp_path / "one.gguf")
    plan = pq.plan(tmp_path / "one.gguf", "gguf", codec="q4_0", allow_unknown=True)
    parts = shares(plan, 3)
    assert [t.share for part in parts for t in part] == [(0, 1024, 3000), (1024, 2048, 3000), (2048, 3000, 3000)]
    assert sum(cost(plan, p) for p in parts) == pytest.approx(cost(plan, shares(plan, 1)[0]), rel=1e-6)
    options = {"codec": "q4_0", "allow_unknown": True}
    for i in (2, 1, 3):
        pq.convert(tmp_path / "one.gguf", tmp_path / "parts.gguf", **options, part=f"{i}/3")
    report = pq.merge(tmp_path / "parts.gguf")
    whole_report = pq.convert(tmp_path / "one.gguf", tmp_path / "whole.gguf", **options)
    assert (tmp_path / "parts.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert len(report.steps) == 1 and report.steps[0].nbytes == whole_report.steps[0].nbytes
    assert report.steps[0].error == whole_report.steps[0].error


@pytest.mark.parametrize("text", ["", "3", "0/3", "4/3", "1/0", "-1/3", "1/3/3", "a/b", "1/9999999", "٣/٨"])
def test_invalid_parts_are_refused(text):
    with pytest.raises(PlanError, match="a part is I/N"):
        parse_part(text)
    assert parse_part("3/8") == Part(3, 8) and str(Part(3, 8)) == "3/8"


def test_a_plan_is_divided_once(monkeypatch, tmp_path):
    plan = pq.plan(SOURCE, "gguf")
    first = shares(plan, 3)
    monkeypatch.setattr(tasks, "_divided", lambda *_: pytest.fail("divided again"))
    assert shares(plan, 3) == first
    pq.convert(plan, tmp_path / "out.gguf", part="2/3")
    with pytest.raises(pytest.fail.Exception):
        shares(dataclasses.replace(plan, steps=plan.steps[:2]), 3)
