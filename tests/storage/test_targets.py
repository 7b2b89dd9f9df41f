"""Targets in missing folders and existing targets are refused, by one rule for all commands."""

from __future__ import annotations

import pytest

from polyquant.errors import PlanError
from polyquant.storage.targets import refuse_present


def rejected(target):
    raise PlanError("is precious", file=target)


def accepted(target):
    pass


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_existing_targets(tmp_path, kind):
    target = tmp_path / "target"
    if kind == "file":
        target.write_bytes(b"")
    elif kind == "folder":
        target.mkdir()
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(PlanError, match=r"target exists.*--overwrite"):
        refuse_present(target, overwrite=False, check=accepted)
    with pytest.raises(PlanError, match="is precious"):
        refuse_present(target, overwrite=True, check=rejected)
    refuse_present(target, overwrite=True, check=accepted)


def test_a_new_target_is_not_checked(tmp_path):
    refuse_present(tmp_path / "new", overwrite=True, check=rejected)


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing/a", r"folder does not exist.*mkdir -p"), ("ftp://host/a", "local files only, not to a URL")],
)
def test_missing_folders(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match=message):
        refuse_present(tmp_path / name, overwrite=True, check=accepted)
