import os
import stat
from pathlib import Path

import numpy as np
import pytest

from polyquant.errors import PlanError
from polyquant.storage.journal import open_journal
from polyquant.storage.staging import refuse_target, staged
from polyquant.types import ArraySpec, FilePlan, Layout, Slot

U8 = np.dtype(np.uint8)


def layout(folder: bool = False) -> Layout:
    slots = {
        ("a", "blocks"): Slot("out", 8, ArraySpec((4,), U8)),
        ("b", "blocks"): Slot("out", 16, ArraySpec((4,), U8)),
    }
    return Layout((FilePlan("out", 24, ((0, b"HEAD"),)),), slots, folder)


def fill(staging, *names: str) -> None:
    for name in names:
        staging.write(name, "blocks", 0, np.full(4, ord(name), np.uint8))
        staging.finish(name, {"note": name})


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


def test_an_early_error_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), staged(tmp_path / "out", layout(), "job"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_is_taken_up_where_it_stopped(tmp_path):
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
    journal = tmp_path / ".out.partial" / ".journal"
    journal.write_bytes(journal.read_bytes()[:-3])
    with staged(dst, layout(), "job") as s:
        assert list(s.done) == ["a"]
        fill(s, "b")
    assert dst.read_bytes() == WHOLE


def test_two_runs_on_one_target_one_wins_and_is_not_disturbed(tmp_path):
    with staged(tmp_path / "out", layout(), "job") as s:
        with pytest.raises(PlanError, match="another run"), staged(tmp_path / "out", layout(), "job"):
            pass
        fill(s, "a", "b")
    assert (tmp_path / "out").read_bytes() == WHOLE


def test_a_run_killed_before_its_headers_were_written_starts_well(tmp_path):
    with staged(tmp_path / "probe", layout(), "job") as s:
        fill(s, "a", "b")
    folder = tmp_path / ".out.partial"
    folder.mkdir()
    os.close(open_journal(folder, "job", None))
    with staged(tmp_path / "out", layout(), "job") as s:
        fill(s, "a", "b")
    assert (tmp_path / "out").read_bytes() == WHOLE


@pytest.mark.parametrize("folder", [False, True])
def test_overwrite_swaps_whole(tmp_path, folder):
    dst = tmp_path / "out"
    for _ in range(2):
        with staged(dst, layout(folder), "job", overwrite=True) as s:
            fill(s, "a", "b")
    assert ((dst / "out") if folder else dst).read_bytes() == WHOLE
    assert list(tmp_path.iterdir()) == [dst]


def test_refused_targets(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    taken = tmp_path / "taken"
    taken.write_bytes(b"precious")
    for dst in (source, source / "inside", tmp_path, taken, tmp_path / "no" / "folder"):
        with pytest.raises(PlanError):
            refuse_target(dst, source, overwrite=False)
    refuse_target(taken, source, overwrite=True)
    link = tmp_path / "link"
    link.symlink_to(source)
    with pytest.raises(PlanError):
        refuse_target(link / "x", source, overwrite=True)


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
