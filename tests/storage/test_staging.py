import errno
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from polyquant.errors import InputError, PlanError
from polyquant.storage import staging, work_folder
from polyquant.storage.staging import staged
from polyquant.types import ArraySpec, FilePlan, Layout, Slot

U8 = np.dtype(np.uint8)


def layout(folder: bool = False) -> Layout:
    slots = {
        ("a", "blocks"): Slot("out", 8, ArraySpec((4,), U8)),
        ("b", "blocks"): Slot("out", 16, ArraySpec((4,), U8)),
    }
    return Layout((FilePlan("out", 24, ((0, b"HEAD"),)),), slots, folder)


def fill(sink, *names: str) -> None:
    for name in names:
        sink.write(name, "blocks", 0, np.full(4, ord(name), np.uint8))
        sink.finish(name, {"note": name})


def interrupted(dst: Path, *names: str, folder: bool = False) -> Path:
    """A run that was stopped when these tensors were complete; its work folder."""
    with pytest.raises(KeyboardInterrupt), staged(dst, layout(folder), "job") as s:
        fill(s, *names)
        raise KeyboardInterrupt
    return unfinished(dst.parent)


def unfinished(folder: Path) -> Path:
    (found,) = (p for p in folder.iterdir() if ".polyquant-" in p.name)
    return found


WHOLE = b"HEAD\0\0\0\0aaaa\0\0\0\0bbbb\0\0\0\0"


def test_nothing_is_visible_until_it_is_whole(tmp_path):
    dst = tmp_path / "out"
    with staged(dst, layout(), "job") as s:
        fill(s, "a", "b")
        assert not dst.exists()
    assert dst.read_bytes() == WHOLE
    assert list(tmp_path.iterdir()) == [dst]


def test_a_folder_target_holds_only_the_output(tmp_path):
    dst = tmp_path / "model"
    with staged(dst, layout(folder=True), "job") as s:
        fill(s, "a", "b")
    assert [p.name for p in dst.iterdir()] == ["out"]
    assert (dst / "out").read_bytes() == WHOLE


def with_inner_file() -> Layout:
    plain = layout(folder=True)
    return Layout((*plain.files, FilePlan("inner/said.json", 2, ((0, b"{}"),))), plain.slots, folder=True)


def test_a_file_in_a_folder_inside_appears_with_the_others(tmp_path):
    dst = tmp_path / "model"
    with pytest.raises(KeyboardInterrupt), staged(dst, with_inner_file(), "job") as s:
        fill(s, "a")
        raise KeyboardInterrupt
    with staged(dst, with_inner_file(), "job", resume="required") as s:
        assert s.done == {"a": {"note": "a"}}
        fill(s, "b")
    assert (dst / "inner/said.json").read_bytes() == b"{}" and (dst / "out").read_bytes() == WHOLE
    assert list(tmp_path.iterdir()) == [dst]


def test_an_error_leaves_no_folder_inside(tmp_path):
    with pytest.raises(ZeroDivisionError), staged(tmp_path / "model", with_inner_file(), "job"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_file_in_a_folder_inside_is_not_published(tmp_path):
    dst = tmp_path / "model"
    with (
        pytest.raises(PlanError, match=r"another program added a file.*inner/theirs|inner/theirs.*another program"),
        staged(dst, with_inner_file(), "job") as s,
    ):
        fill(s, "a", "b")
        (s.folder / "inner/theirs").write_text("x")
    assert not dst.exists()


def test_a_link_in_place_of_a_folder_inside_is_not_followed(tmp_path):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    dst = tmp_path / "target" / "model"
    dst.parent.mkdir()
    with pytest.raises(KeyboardInterrupt), staged(dst, with_inner_file(), "job") as s:
        fill(s, "a")
        raise KeyboardInterrupt
    inner = unfinished(dst.parent) / "files/inner"
    (inner / "said.json").unlink()
    inner.rmdir()
    inner.symlink_to(elsewhere)
    with staged(dst, with_inner_file(), "job") as s:
        assert s.done == {}
        fill(s, "a", "b")
    assert list(elsewhere.iterdir()) == [] and (dst / "inner/said.json").read_bytes() == b"{}"


def test_an_early_error_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), staged(tmp_path / "out", layout(), "job"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_is_resumed(tmp_path):
    dst = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), staged(dst, layout(), "job") as s:
        fill(s, "a")
        raise KeyboardInterrupt
    assert not dst.exists()
    with staged(dst, layout(), "job", resume="required") as s:
        assert s.done == {"a": {"note": "a"}}
        fill(s, "b")
    assert dst.read_bytes() == WHOLE


def test_the_journal_of_another_job_is_not_resumed(tmp_path):
    with pytest.raises(KeyboardInterrupt), staged(tmp_path / "out", layout(), "job") as s:
        fill(s, "a")
        raise KeyboardInterrupt
    with (
        pytest.raises(PlanError, match="nothing to resume"),
        staged(tmp_path / "out", layout(), "other", resume="required"),
    ):
        pass
    with staged(tmp_path / "out", layout(), "other") as s:
        assert s.done == {}
        fill(s, "a", "b")


def test_a_torn_journal_line_is_redone(tmp_path):
    dst = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), staged(dst, layout(), "job") as s:
        fill(s, "a", "b")
        raise KeyboardInterrupt
    journal = unfinished(tmp_path) / "journal"
    journal.write_bytes(journal.read_bytes()[:-3])
    with staged(dst, layout(), "job") as s:
        assert list(s.done) == ["a"]
        fill(s, "b")
    assert dst.read_bytes() == WHOLE


def test_lines_after_a_torn_line_are_read(tmp_path):
    dst = tmp_path / "out"
    work = interrupted(dst, "a", "b")
    (work / "journal").write_bytes((work / "journal").read_bytes()[:-3])
    with pytest.raises(KeyboardInterrupt), staged(dst, layout(), "job") as s:
        fill(s, "b")
        raise KeyboardInterrupt
    with staged(dst, layout(), "job") as s:
        assert list(s.done) == ["a", "b"]
    assert dst.read_bytes() == WHOLE


def test_an_error_of_a_job_that_cannot_be_resumed_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="I/O"), staged(tmp_path / "out", layout(), "job", resume="never") as s:
        fill(s, "a")
        raise OSError(5, "I/O error")
    assert list(tmp_path.iterdir()) == []


def test_two_runs_on_one_target_one_wins_and_is_not_disturbed(tmp_path):
    with staged(tmp_path / "out", layout(), "job") as s:
        with pytest.raises(PlanError, match="another run"), staged(tmp_path / "out", layout(), "job"):
            pass
        fill(s, "a", "b")
    assert (tmp_path / "out").read_bytes() == WHOLE


@pytest.mark.parametrize("folder", [False, True])
def test_overwrite_swaps_whole(tmp_path, folder):
    dst = tmp_path / "out"
    for _ in range(2):
        with staged(dst, layout(folder), "job", replaceable=lambda target: ["out"] if folder else []) as s:
            fill(s, "a", "b")
    assert ((dst / "out") if folder else dst).read_bytes() == WHOLE
    assert list(tmp_path.iterdir()) == [dst]


def test_modes_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with staged(tmp_path / "out", layout(), "job") as s:
            fill(s, "a", "b")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o640


def test_more_than_planned_is_a_bug_not_a_file(tmp_path: Path):
    with pytest.raises(AssertionError), staged(tmp_path / "out", layout(), "job") as s:
        s.write("a", "blocks", 2, np.zeros(4, np.uint8))


@pytest.mark.parametrize("damage", ["cut", "byte", "gone", "padding", "header"])
def test_bytes_that_were_damaged_since_are_written_again(tmp_path, damage):
    dst = tmp_path / "out"
    staged_file = interrupted(dst, "a", "b") / "files/out"
    raw = bytearray(staged_file.read_bytes())
    if damage == "gone":
        staged_file.unlink()
    elif damage == "cut":
        staged_file.write_bytes(raw[:18])
    else:
        raw[{"byte": 17, "padding": 13, "header": 1}[damage]] ^= 1
        staged_file.write_bytes(raw)
    with staged(dst, layout(), "job", resume="required") as s:
        assert list(s.done) == {"cut": ["a"], "byte": ["a"], "gone": []}.get(damage, ["a", "b"])
        fill(s, *({"a", "b"} - s.done.keys()))
    assert dst.read_bytes() == WHOLE
    assert list(tmp_path.iterdir()) == [dst]


@pytest.mark.parametrize("name", [".out.partial", ".out.replaced", ".out.polyquant-0123456789abcdef", ".out.lock"])
@pytest.mark.parametrize("link", [True, False])
def test_similar_names_next_to_the_target_are_kept(tmp_path, name, link):
    precious = tmp_path / "elsewhere" if link else tmp_path / name
    precious.mkdir()
    (precious / "out").write_text("precious")
    (precious / "journal").write_text("precious")
    if link:
        (tmp_path / name).symlink_to(precious)
    for folder in (False, True):
        with staged(tmp_path / "out", layout(folder), "job", replaceable=lambda _: []) as s:
            fill(s, "a", "b")
        if not folder:
            (tmp_path / "out").unlink()
    assert (precious / "out").read_text() == (precious / "journal").read_text() == "precious"
    assert (tmp_path / name).is_symlink() == link


@pytest.mark.parametrize("plant", ["link to a file", "hard link", "link to a folder", "journal"])
def test_a_link_planted_in_the_work_folder_is_not_followed(tmp_path, plant):
    precious, dst = tmp_path / "precious", tmp_path / "out"
    work = interrupted(dst, "a")
    if plant == "link to a folder":
        precious.mkdir()
        (precious / "out").write_bytes(b"precious")
        (work / "files/out").unlink()
        (work / "files").rmdir()
        (work / "files").symlink_to(precious)
    else:
        precious.write_bytes(b"precious")
        place = work / ("journal" if plant == "journal" else "files/out")
        place.unlink()
        place.hardlink_to(precious) if plant == "hard link" else place.symlink_to(precious)
    with staged(dst, layout(), "job") as s:
        assert not s.done
        fill(s, "a", "b")
    assert dst.read_bytes() == WHOLE
    assert (precious / "out" if precious.is_dir() else precious).read_bytes() == b"precious"
    with staged(tmp_path / "out2", layout(), "job") as s:
        fill(s, "a", "b")


def test_foreign_files_in_the_work_folder_are_kept(tmp_path):
    work = interrupted(tmp_path / "out", "a")
    (work / "notes.txt").write_text("precious")
    (work / "files/more.txt").write_text("precious")
    with staged(tmp_path / "out", layout(), "another job") as s:
        fill(s, "a", "b")
    assert (tmp_path / "out").read_bytes() == WHOLE
    assert (work / "notes.txt").read_text() == (work / "files/more.txt").read_text() == "precious"
    assert not (work / "files/out").exists()


def test_a_foreign_file_among_the_output_is_not_published(tmp_path):
    with (
        pytest.raises(PlanError, match="added a file to the output"),
        staged(tmp_path / "m", layout(True), "job") as s,
    ):
        fill(s, "a", "b")
        (s.folder / "foreign").write_text("precious")
    assert not (tmp_path / "m").exists()
    assert (unfinished(tmp_path) / "files/foreign").read_text() == "precious"


def test_a_target_that_appears_meanwhile_is_not_overwritten(tmp_path):
    dst = tmp_path / "out"
    with pytest.raises(PlanError, match="target exists"), staged(dst, layout(), "job") as s:
        fill(s, "a", "b")
        dst.write_text("precious")
    assert dst.read_text() == "precious" and list(tmp_path.iterdir()) == [dst]


def test_late_files_in_the_old_folder_are_kept(tmp_path):
    dst = tmp_path / "model"
    for _ in range(2):
        with staged(dst, layout(True), "job", replaceable=lambda target: ["out"]) as s:
            fill(s, "a", "b")
            if dst.exists():
                (dst / "notes.txt").write_text("precious")
    assert names(dst) == ["out"]
    assert (unfinished(tmp_path) / "replaced/model/notes.txt").read_text() == "precious"


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize(
    "error, kept",
    [(OSError(5, "I/O error"), True), (KeyboardInterrupt(), True), (MemoryError(), True), (ZeroDivisionError(), True),
        (InputError("holds NaN"), False)],
)  # fmt: skip
def test_only_resumable_work_is_kept(tmp_path, error, kept):
    with pytest.raises(type(error)) as caught, staged(tmp_path / "out", layout(), "job") as s:
        fill(s, "a")
        raise error
    notes = getattr(caught.value, "__notes__", [])
    assert bool(list(tmp_path.iterdir())) == kept == bool(notes)
    if kept:
        assert f"rm -r '{unfinished(tmp_path)}'" in notes[0]


def test_long_names_and_names_that_are_not_utf8(tmp_path):
    for raw in (b"x" * 255, b"\xff" * 200, b"a\nb"):
        dst = tmp_path / os.fsdecode(raw)
        work = interrupted(dst, "a")
        with staged(dst, layout(), "job", resume="required") as s:
            fill(s, "b")
        assert dst.read_bytes() == WHOLE and not work.exists()


def test_names_with_a_common_prefix_do_not_share_work(tmp_path):
    first = interrupted(tmp_path / ("x" * 250 + "1"), "a")
    with staged(tmp_path / ("x" * 250 + "2"), layout(), "job") as s:
        fill(s, "a", "b")
    assert first.exists()


def test_without_an_exchange_folders_are_replaced_in_two_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(work_folder, "exchange", lambda a, b: False)
    for _ in range(2):
        with staged(tmp_path / "m", layout(True), "job", replaceable=lambda target: ["out"]) as s:
            fill(s, "a", "b")
    assert names(tmp_path) == ["m"] and names(tmp_path / "m") == ["out"]


def test_an_error_of_the_disk_beside_the_conversion_stops_it(tmp_path, monkeypatch):
    """The disk reports such an error once, to the thread that syncs."""
    monkeypatch.setattr(staging, "_SYNC_EVERY", 4)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdatasync", full, raising=False)
    with pytest.raises(OSError, match="No space left") as e, staged(tmp_path / "out", layout(), "job") as s:
        fill(s, "a", "b")
    assert Path(e.value.filename).name == "out"
    assert not (tmp_path / "out").exists()


def test_bytes_are_sent_to_disk_beside_the_conversion(tmp_path, monkeypatch):
    """After a number of bytes, of the file that was written last."""
    monkeypatch.setattr(staging, "_SYNC_EVERY", 8)
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.fstat(fd).st_size), raising=False)
    with staged(tmp_path / "out", layout(), "job") as s:
        fill(s, "a")
        assert not synced
        fill(s, "b")
    assert synced == [24]
    assert (tmp_path / "out").read_bytes() == WHOLE
