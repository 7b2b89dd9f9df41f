"""s3:// as a target, against a local S3 server with injected faults; runs that are killed and resumed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import polyquant as pq
import upload_child
from golden import VECTORS
from polyquant.conversion import execute
from polyquant.conversion.execute import Engine
from polyquant.errors import InputError, PlanError, RemoteError
from polyquant.storage.locations import located
from polyquant.storage.remote import retry, s3, upload_parts
from polyquant.storage.remote.upload_state import state_folder
from s3_server import s3_server

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")

SOURCE = VECTORS / "models/tiny-llama-tied/hf"
JOBS = {
    "gguf": ("out.gguf", {"codec": "q8_0"}),
    "split": ("out.gguf", {"codec": "q8_0", "shard_bytes": 100_000}),
    "folder": ("out", {"to": "hf", "codec": "bf16", "shard_bytes": 100_000}),
    "trellis": ("out", {"to": "trellis-v3", "bits": 3, "effort": "fast"}),
    "msmodelslim": ("out", {"to": "msmodelslim", "codec": "w8a16"}),
}
LAST = {"folder": "config.json", "trellis": "config.json", "msmodelslim": "config.json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    with s3_server(tmp_path_factory.mktemp("state")) as running:
        s3fs.S3FileSystem.clear_instance_cache()
        running.fs = s3fs.S3FileSystem(endpoint_url=running.direct, skip_instance_cache=True, use_listings_cache=False)
        running.fs.mkdir("bucket")
        yield running
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(autouse=True)
def _clean(request, monkeypatch):
    monkeypatch.setattr(upload_parts, "_LEAST", upload_child.PART)
    monkeypatch.setattr(upload_parts, "_MIB", 1)
    monkeypatch.setattr(retry, "FIRST_DELAY", 0.01)
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        server.faults(0.0)
        empty(server)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The bytes of each job's local output, by name."""
    made = {}

    def of(job: str) -> dict[str, bytes]:
        if job not in made:
            name, options = JOBS[job]
            folder = tmp_path_factory.mktemp(job)
            pq.convert(SOURCE, folder / name, **options)
            made[job] = content(folder)
        return made[job]

    return of


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def visible(server) -> set[str]:
    """The names of all visible objects of the run."""
    answer = server.fs.call_s3("list_objects_v2", Bucket="bucket", Prefix="run/")
    assert not answer.get("IsTruncated")
    return {entry["Key"].removeprefix("run/") for entry in answer.get("Contents", [])}


def objects(server) -> dict[str, bytes]:
    """All visible objects of the run."""
    return {name: server.fs.cat_file(f"bucket/run/{name}") for name in visible(server)}


def empty(server) -> None:
    """Remove all objects of the run."""
    for name in visible(server):
        server.fs.call_s3("delete_object", Bucket="bucket", Key=f"run/{name}")


def unfinished(server) -> int:
    return len(server.fs.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads", []))


@pytest.mark.parametrize("job", JOBS)
def test_an_upload_equals_a_local_output(server, expected, job):
    name, options = JOBS[job]
    report = pq.convert(SOURCE, f"s3://bucket/run/{name}", **options)
    assert objects(server) == expected(job)
    assert str(report.path) == f"s3://bucket/run/{min(objects(server)) if job == 'split' else name}"
    assert unfinished(server) == 0
    assert not state_folder(located(f"s3://bucket/run/{name}")).exists()
    assert list(pq.open(report.path))


@pytest.mark.parametrize("job", JOBS)
def test_parts_beyond_the_budget_wait_in_a_file(server, expected, job, monkeypatch):
    monkeypatch.setattr(execute, "upload_memory", lambda layout, limit=None: 3 * upload_child.PART)
    name, options = JOBS[job]
    pq.convert(SOURCE, f"s3://bucket/run/{name}", threads=4, **options)
    assert objects(server) == expected(job)


@pytest.mark.parametrize("job", ["gguf", "folder"])
def test_faults_of_the_server(server, expected, job):
    name, options = JOBS[job]
    server.counts(reset=True)
    for seed in range(2):
        server.faults(0.15, seed)
        pq.convert(SOURCE, f"s3://bucket/run/{seed}/{name}", **options)
    counts = server.counts()
    server.faults(0.0)
    assert sum(n for kind, n in counts.items() if kind.startswith("fault")) >= 4
    assert objects(server) == {f"{seed}/{n}": data for seed in range(2) for n, data in expected(job).items()}


def test_a_small_object_that_was_damaged_is_written_again(server, expected, monkeypatch):
    original, answers = s3._checked, []

    def damaged(answer, md5):
        answers.append(answer)
        return original({**answer, "ETag": "0" * 32} if len(answers) in (1, 3) else answer, md5)

    monkeypatch.setattr(s3, "_checked", damaged)
    name, options = JOBS["folder"]
    server.counts(reset=True)
    pq.convert(SOURCE, f"s3://bucket/run/{name}", **options)
    assert server.counts()["PUT"] == len(answers)
    assert objects(server) == expected("folder")
    store, url = s3.S3(located("s3://bucket/run/small")), located("s3://bucket/run/small")
    answers[:] = [None, None]
    store.put(url, b"content", "token", replace=False)
    assert len(answers) == 4
    assert objects(server)["small"] == b"content"


# ---------------------------------------------------------------- existing targets, refusals


def test_an_existing_object_is_kept(server, expected):
    server.fs.pipe_file("bucket/run/out.gguf", b"not a model")
    for overwrite, message in ((False, "target exists"), (True, "target is not a model file and is not overwritten")):
        with pytest.raises(PlanError, match=message):
            pq.convert(SOURCE, "s3://bucket/run/out.gguf", codec="q8_0", overwrite=overwrite)
    assert objects(server) == {"out.gguf": b"not a model"}
    pq.convert(SOURCE, "s3://bucket/run/b.gguf", codec="f16")
    pq.convert(SOURCE, "s3://bucket/run/b.gguf", codec="q8_0", overwrite=True)
    assert objects(server)["b.gguf"] == expected("gguf")["out.gguf"]


def test_an_object_that_appears_meanwhile_is_kept(server):
    def appear(progress):
        server.fs.pipe_file("bucket/run/out.gguf", b"of someone else")

    with pytest.raises(PlanError, match="target exists"):
        pq.convert(SOURCE, "s3://bucket/run/out.gguf", codec="q8_0", on_progress=appear)
    assert objects(server) == {"out.gguf": b"of someone else"}
    assert unfinished(server) == 0


def test_an_existing_folder(server, expected):
    name, options = JOBS["folder"]
    pq.convert(SOURCE, f"s3://bucket/run/{name}", **options)
    with pytest.raises(PlanError, match="target exists"):
        pq.convert(SOURCE, f"s3://bucket/run/{name}", **options)
    pq.convert(SOURCE, f"s3://bucket/run/{name}", overwrite=True, **options)
    assert objects(server) == expected("folder")
    with pytest.raises(PlanError, match=r"files that the new one does not replace \(found model-00001-of-"):
        pq.convert(SOURCE, f"s3://bucket/run/{name}", to="hf", codec="bf16", overwrite=True)
    server.fs.pipe_file(f"bucket/run/{name}/notes.txt", b"mine")
    with pytest.raises(PlanError, match=r"not part of a model and is not overwritten \(found notes.txt\)"):
        pq.convert(SOURCE, f"s3://bucket/run/{name}", overwrite=True, **options)
    assert objects(server) == expected("folder") | {"out/notes.txt": b"mine"}


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("s3://no-bucket/out.gguf", RemoteError, "the bucket does not exist"),
        ("s3://bucket", PlanError, "the URL has no name"),
        ("https://host/out.gguf", PlanError, "a web server is only read"),
        ("hf://org/name", PlanError, "polyquant push"),
        ("s3://someone:TOPSECRET@bucket/out.gguf", InputError, "credentials do not belong into it"),
    ],
)
def test_refused_targets(server, target, error, message):
    with pytest.raises(error, match=message) as caught:
        pq.convert(SOURCE, target, to="gguf", codec="q8_0")
    assert "TOPSECRET" not in str(caught.value)


def test_a_url_as_source_and_target(server):
    server.fs.put(str(SOURCE), "bucket/run/source", recursive=True)
    for target in ("s3://bucket/run/source", "s3://bucket/run/source/out.gguf", "s3://bucket/run"):
        with pytest.raises(PlanError, match="is, contains or is inside the source"):
            pq.convert("s3://bucket/run/source", target, to="gguf")
    pq.convert("s3://bucket/run/source", "s3://bucket/run/out.gguf", codec="q8_0")
    assert pq.inspect("s3://bucket/run/out.gguf").tensors


@pytest.mark.parametrize("options", [{"part": "1/2"}, {"engine": Engine("ray")}])
def test_several_machines_need_a_folder(server, options):
    with pytest.raises(PlanError, match=r"a folder that all machines share, not a URL.*aws s3 cp"):
        pq.convert(SOURCE, "s3://bucket/run/out.gguf", **options)


@pytest.mark.parametrize(("status", "message"), [(403, "access is denied"), (400, "access is denied.*expired")])
def test_permissions_that_end_during_an_upload(server, expected, status, message):
    calls = []

    def expire(progress):
        calls.append(progress)
        if len(calls) == 7:
            time.sleep(0.3)  # let the uploads that have begun end
            server.faults(0.0, refuse=status)

    with pytest.raises(RemoteError, match=message) as caught:
        pq.convert(SOURCE, "s3://bucket/run/out.gguf", codec="q8_0", on_progress=expire, threads=1)
    assert "TOPSECRET" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "the same command resumes" in caught.value.__notes__[0]
    server.faults(0.0)
    assert objects(server) == {}
    server.counts(reset=True)
    pq.convert(SOURCE, "s3://bucket/run/out.gguf", codec="q8_0", resume="required")
    assert objects(server) == expected("gguf")
    assert unfinished(server) == 0


# ---------------------------------------------------------------- resume


def interrupted(server, after: int, **options):
    """Begin a conversion and interrupt it after some calls of on_progress."""
    calls = []

    def stop(progress):
        calls.append(progress)
        if len(calls) == after:
            time.sleep(0.3)  # let the uploads that have begun end
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        pq.convert(SOURCE, "s3://bucket/run/out.gguf", codec="q8_0", threads=1, on_progress=stop, **options)
    return caught.value


def test_only_missing_parts_are_uploaded_again(server, expected):
    interrupted(server, 8)
    assert unfinished(server) == 1
    done = []
    server.counts(reset=True)
    pq.convert(SOURCE, "s3://bucket/run/out.gguf", codec="q8_0", on_progress=done.append)
    data = expected("gguf")["out.gguf"]
    assert server.counts()["bytes"] < 0.8 * len(data)
    assert 0 < len(done) < 10  # the other tensors were not converted again
    assert objects(server) == {"out.gguf": data}


def test_another_job_removes_what_an_unfinished_one_uploaded(server, expected):
    interrupted(server, 8)
    with pytest.raises(PlanError, match="nothing to resume"):
        pq.convert(SOURCE, "s3://bucket/run/out.gguf", codec="q4_0", resume="required")
    assert unfinished(server) == 1
    pq.convert(SOURCE, "s3://bucket/run/out.gguf", codec="f16")
    assert unfinished(server) == 0


def test_resume_never_starts_over(server, expected):
    interrupted(server, 8)
    server.counts(reset=True)
    pq.convert(SOURCE, "s3://bucket/run/out.gguf", codec="q8_0", resume="never")
    assert server.counts()["bytes"] >= len(expected("gguf")["out.gguf"])
    assert objects(server) == expected("gguf")
    assert unfinished(server) == 0
    interrupted(server, 8, resume="never", overwrite=True)
    assert unfinished(server) == 0


def test_an_upload_that_the_server_has_removed_starts_over(server, expected):
    interrupted(server, 8)
    (upload,) = server.fs.call_s3("list_multipart_uploads", Bucket="bucket")["Uploads"]
    server.fs.call_s3("abort_multipart_upload", Bucket="bucket", Key=upload["Key"], UploadId=upload["UploadId"])
    pq.convert(SOURCE, "s3://bucket/run/out.gguf", codec="q8_0")
    assert objects(server) == expected("gguf")


def test_a_part_that_another_program_has_replaced_is_uploaded_again(server, expected):
    interrupted(server, 8)
    (upload,) = server.fs.call_s3("list_multipart_uploads", Bucket="bucket")["Uploads"]
    where = {"Bucket": "bucket", "Key": upload["Key"], "UploadId": upload["UploadId"]}
    number = server.fs.call_s3("list_parts", **where)["Parts"][0]["PartNumber"]
    server.fs.call_s3("upload_part", **where, PartNumber=number, Body=bytes(upload_child.PART))
    pq.convert(SOURCE, "s3://bucket/run/out.gguf", codec="q8_0")
    assert objects(server) == expected("gguf")


def test_a_second_run_on_the_same_target_is_refused(server):
    problems = []

    def again(progress):
        if not problems:
            with pytest.raises(PlanError, match="another run is writing this target") as caught:
                pq.convert(SOURCE, "s3://bucket/run/out.gguf", codec="q8_0")
            problems.append(caught.value)

    pq.convert(SOURCE, "s3://bucket/run/out.gguf", codec="q8_0", on_progress=again)
    assert len(problems) == 1


def test_a_torn_line_of_the_journal(server, expected):
    interrupted(server, 8)
    path = next(p for p in state_folder(located("s3://bucket/run/out.gguf")).iterdir())
    os.truncate(path, path.stat().st_size - 5)
    pq.convert(SOURCE, "s3://bucket/run/out.gguf", codec="q8_0")
    assert objects(server) == expected("gguf")


# ---------------------------------------------------------------- kills


class Watch(threading.Thread):
    """Lists the target repeatedly; collects every state in which something was visible."""

    def __init__(self, server) -> None:
        super().__init__(daemon=True)
        self.server, self.seen, self.ended = server, [], threading.Event()

    def run(self) -> None:
        while not self.ended.is_set():
            found = visible(self.server)
            if found and (not self.seen or self.seen[-1] != found):
                self.seen.append(found)
            time.sleep(0.01)

    def stop(self):
        self.ended.set()
        self.join()
        return self.seen


def killed_until_complete(server, job: str, seed: int, rate: float, most: int) -> int:
    """Run a job in processes that are killed at random moments until one ends. Returns the number of kills."""
    rng, (name, options) = random.Random(seed), JOBS[job]
    command = [sys.executable, upload_child.__file__, str(SOURCE), f"s3://bucket/run/{name}", json.dumps(options)]
    server.faults(rate, seed)
    for kills in range(most + 1):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
            try:
                _, errors = child.communicate(timeout=None if kills == most else 0.7 + rng.random() * 1.2)
            except subprocess.TimeoutExpired:
                child.kill()
                child.communicate()
                continue
        if child.returncode == 2 and "target exists" in errors:  # killed after the publication
            return kills
        assert child.returncode == 0, errors
        return kills
    raise AssertionError("never complete")


def check_kills(server, expected, job: str, seed: int, *, rate: float = 0.05, most: int) -> int:
    watch = Watch(server)
    watch.start()
    kills = killed_until_complete(server, job, seed, rate, most)
    seen = watch.stop()
    assert objects(server) == expected(job)
    everything = set(expected(job))
    for found in seen:
        assert found <= everything, found
        if len(everything) > 1 and found != everything:
            first = f"out/{LAST[job]}" if job in LAST else min(everything)
            assert first not in found, found  # readers start from it
    return kills


@pytest.mark.parametrize("job", ["gguf", "folder"])
def test_kills_and_faults(server, expected, job):
    check_kills(server, expected, job, seed=3, most=1)


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_many_kills_and_faults(server, expected, job):
    kills = 0
    for seed in range(12):
        kills += check_kills(server, expected, job, seed, most=4)
        server.faults(0.0)
        empty(server)
    assert kills > 6
