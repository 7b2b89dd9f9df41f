"""Output to URLs without multipart uploads: written to this machine, then sent."""

from __future__ import annotations

import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS
from polyquant.errors import PlanError, RemoteError
from polyquant.storage.locations import located
from polyquant.storage.remote import retry, spooled
from polyquant.storage.remote.upload_state import state_folder

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")

SOURCE = VECTORS / "models/tiny-llama-tied/hf"
JOBS = {
    "gguf": ("out.gguf", {"codec": "q8_0"}),
    "split": ("out.gguf", {"codec": "q8_0", "shard_bytes": 100_000}),
    "folder": ("out", {"to": "hf", "codec": "bf16", "shard_bytes": 100_000}),
}


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(retry, "ATTEMPTS", 3)
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


def objects(memory) -> dict[str, bytes]:
    return {name.removeprefix("/m/"): memory.cat_file(name) for name in memory.find("/m")}


def expected(folder, job: str) -> dict[str, bytes]:
    name, options = JOBS[job]
    folder.mkdir()
    pq.convert(SOURCE, folder / name, **options)
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("job", JOBS)
def test_an_output_that_is_sent_equals_a_local_one(memory, tmp_path, monkeypatch, job, renamed):
    if renamed:  # as on file servers, where half a file is visible
        monkeypatch.setattr(spooled, "_AT_ONCE", frozenset())
    name, options = JOBS[job]
    pq.convert(SOURCE, f"memory://m/{name}", **options)
    assert objects(memory) == expected(tmp_path / "local", job)
    assert not state_folder(located(f"memory://m/{name}")).exists()


def test_existing_targets(memory, tmp_path):
    name, options = JOBS["folder"]
    pq.convert(SOURCE, f"memory://m/{name}", **options)
    with pytest.raises(PlanError, match="target exists"):
        pq.convert(SOURCE, f"memory://m/{name}", **options)
    pq.convert(SOURCE, f"memory://m/{name}", overwrite=True, **options)
    memory.pipe_file("/m/out/notes.txt", b"mine")
    with pytest.raises(PlanError, match="not part of a model"):
        pq.convert(SOURCE, f"memory://m/{name}", overwrite=True, **options)
    assert objects(memory) == expected(tmp_path / "local", "folder") | {"out/notes.txt": b"mine"}


def test_unsent_files_are_sent_by_the_next_run(memory, tmp_path, monkeypatch):
    def fail(self, *arguments, **options):
        raise ConnectionResetError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "put_file", fail)
        with pytest.raises(
            RemoteError, match=r"cannot be written: ConnectionResetError: gone \(3 attempts\)"
        ) as caught:
            pq.convert(SOURCE, "memory://m/out.gguf", codec="q8_0")
    assert "the same command resumes" in caught.value.__notes__[0]
    assert objects(memory) == {}
    done = []
    pq.convert(SOURCE, "memory://m/out.gguf", codec="q8_0", resume="required", on_progress=done.append)
    assert done == []  # nothing was converted again
    assert objects(memory) == expected(tmp_path / "local", "gguf")


def test_a_file_that_arrives_short_is_sent_again(memory, tmp_path, monkeypatch):
    original, calls = type(memory).put_file, []

    def short(self, local, to, **options):
        calls.append(to)
        original(self, local, to, **options)
        if len(calls) == 1:
            self.pipe_file(to, self.cat_file(to)[:-1])

    monkeypatch.setattr(type(memory), "put_file", short)
    pq.convert(SOURCE, "memory://m/out.gguf", codec="q8_0")
    assert len(calls) == 2
    assert objects(memory) == expected(tmp_path / "local", "gguf")


def test_arrays_are_saved_to_a_url(memory):
    w = np.arange(256, dtype=np.float32).reshape(4, 64)
    pq.save({"blk.0.w.weight": w}, "memory://m/w.gguf")
    np.testing.assert_array_equal(pq.open("memory://m/w.gguf")["blk.0.w.weight"].dequantize(), w)


def test_commands_that_write_local_files_refuse_a_url(memory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pq.convert(SOURCE, "m.gguf", codec="q8_0")
    with pytest.raises(PlanError, match="local files only, not to a URL"):
        pq.merge("memory://m/out.gguf")
    assert not (tmp_path / "memory:").exists()
