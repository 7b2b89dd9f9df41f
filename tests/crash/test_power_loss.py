"""Every job that writes survives a power loss after any of its operations (power.py), and the model of it is right."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from crash.power import Disk, Operation
from crash.test_every_point import check, serving
from crash.verbs import QUICK, UNSYNCED, VERBS


@pytest.fixture(scope="module")
def ask():
    with serving() as server:
        yield server


@pytest.mark.parametrize("verb", QUICK)
def test_short_jobs(ask, verb):
    check(ask(verb, ("power",), 9), 2)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_every_job_after_each_operation(ask, verb, record_property):
    found = ask(verb, ("power",), 1)
    record_property("states", found["tried"])
    check(found, 2)


@pytest.mark.parametrize("verb", UNSYNCED)
def test_a_missing_fsync_is_found(ask, verb):
    assert ask(verb, ("power",), 8)["wrong"]


def states(operations: list[Operation], files: dict[str, bytes], *, atomic: bool = False) -> list[dict[str, bytes]]:
    disk = Disk(files, atomic=atomic)
    for operation in operations:
        disk.apply(operation)
    return [state.files for state in disk.states(Random(0), 100)]


NEW = [Operation("create", "new", at=1), Operation("write", "new", data=b"full")]
SYNC = Operation("sync", "new")
OVER = Operation("rename", "new", "m")


def test_bytes_of_a_file_without_fsync_may_be_lost():
    found = states([*NEW, OVER], {"m": b"old"})
    assert {f["m"] for f in found} == {b"old", b"full", b"", b"fu", bytes(4)}


def test_a_synced_file_replaces_the_old_one_whole():
    found = states([*NEW, SYNC, OVER], {"m": b"old"})
    assert {f["m"] for f in found} == {b"old", b"full"}


def test_a_name_is_durable_after_fsync_of_its_folder():
    assert {tuple(f) for f in states([*NEW, SYNC], {})} == {(), ("new",)}
    assert {tuple(f.items()) for f in states([*NEW, SYNC, OVER, Operation("sync", "")], {"m": b"old"})} == {
        (("m", b"full"),)
    }


def test_two_renames_survive_in_any_combination():
    renames = [Operation("rename", "a", "c"), Operation("rename", "b", "d")]
    found = {tuple(sorted(f)) for f in states(renames, {"a": b"", "b": b""})}
    assert found == {("a", "b"), ("b", "c"), ("a", "d"), ("c", "d")}


def test_an_exchange_is_atomic():
    found = states([Operation("exchange", "a", "b")], {"a/x": b"1", "b/x": b"2"})
    assert {(f["a/x"], f["b/x"]) for f in found} == {(b"1", b"2"), (b"2", b"1")}


def test_a_folder_is_not_removed_without_its_files():
    found = states(
        [Operation("remove", "a/x"), Operation("remove", "a/y"), Operation("remove", "a")], {"a/x": b"", "a/y": b""}
    )
    assert {tuple(sorted(f)) for f in found} == {(), ("a/x",), ("a/y",), ("a/x", "a/y")}
    disk = Disk({"a/x": b""})
    for operation in (Operation("remove", "a/x"), Operation("remove", "a"), Operation("sync", "")):
        disk.apply(operation)
    assert all(state.files == {} and state.folders == () for state in disk.states(Random(0), 20))


def test_a_file_moved_to_a_new_folder_may_vanish_with_it():
    moved = [Operation("mkdir", "d", at=1), Operation("rename", "m", "d/m")]
    assert {} in states(moved, {"m": b"old"})
    synced = [moved[0], Operation("sync", ""), moved[1]]
    assert {tuple(f) for f in states(synced, {"m": b"old"})} == {("m",), ("d/m",)}


def test_unsynced_truncation_and_writes():
    found = {
        f["m"]
        for f in states([Operation("truncate", "m", at=6), Operation("write", "m", at=4, data=b"xy")], {"m": b"old!"})
    }
    assert found == {b"old!", b"old!\0\0", b"old!xy", b"old!x\0", b"old!x"}
    page = {f["m"] for f in states([Operation("write", "m", at=0, data=b"NEW")], {"m": b"old!"}, atomic=True)}
    assert page == {b"old!", b"NEW!"}


def test_hard_links_share_their_bytes(tmp_path: Path):
    disk = Disk({"a": b"x"})
    disk.apply(Operation("link", "a", "b"))
    disk.apply(Operation("sync", ""))
    (state, *_) = disk.states(Random(0), 0)
    inodes = state.build(tmp_path)
    assert (tmp_path / "a").samefile(tmp_path / "b") and len(inodes) == 1
