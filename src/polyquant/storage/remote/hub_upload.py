"""Upload files to a repository of the hub: one commit, so that either all of them appear or none.

huggingface_hub transfers the files. A file of the repository with other content is only replaced on request, and the
commit is refused if someone else commits meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyquant.errors import InputError, PlanError, RemoteError, listed, masked, printable
from polyquant.storage.file_state import Entry
from polyquant.storage.locations import RemotePath, forget
from polyquant.storage.remote.extra import missing
from polyquant.storage.remote.hub import HINTS, Hub, repository

__all__ = ["upload"]

_PIECE = 1 << 20


def upload(
    files: Mapping[str, Path | bytes], target: RemotePath, *, overwrite: bool, private: bool, message: str
) -> tuple[str, list[str]]:
    """Upload files by name. Returns the address of the commit, and the names that were new or different.

    Raises PlanError for files that would be replaced without `overwrite`, RemoteError.
    """
    if target.scheme != "hf" or len(target.parts) != 3:
        raise PlanError("only a repository of the hub is a target", file=target, expected="hf://org/name[@revision]")
    try:
        from huggingface_hub import CommitOperationAdd, HfApi, constants
    except ImportError:
        raise missing("huggingface_hub", target) from None
    name, revision, _ = repository(target)
    api = HfApi(endpoint=constants.ENDPOINT)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        forget(target)
        commit, there = Hub(target).files(target)
        changed = [n for n, content in files.items() if not (n in there and _same(content, there[n]))]
        if (replaced := [n for n in changed if n in there and n != ".gitattributes"]) and not overwrite:
            raise PlanError(
                f"{len(replaced)} files of the repository have other content: {listed(replaced)}",
                file=target,
                hint="--overwrite replaces them",
            )
        if not changed:
            return f"{constants.ENDPOINT}/{name}/commit/{commit}", []
        operations = [CommitOperationAdd(n, files[n]) for n in changed]
        made = api.create_commit(
            name, operations, commit_message=message, revision=revision, parent_commit=commit if commit else None
        )
    except (InputError, PlanError, RemoteError):
        raise
    except Exception as problem:  # noqa: BLE001 - huggingface_hub and its HTTP client have their own exceptions
        raise _translated(problem, target) from None
    finally:
        forget(target)
    return str(made.commit_url), changed


def _same(content: Path | bytes, entry: Entry) -> bool:
    """Return True if a file of the repository has this content: its tag is a SHA-256, or the id of a git blob."""
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    if size != entry.size:
        return False
    large = len(entry.tag) == 64
    digest = hashlib.sha256() if large else hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    if isinstance(content, bytes):
        digest.update(content)
    else:
        with content.open("rb") as f:
            while piece := f.read(_PIECE):
                digest.update(piece)
    return digest.hexdigest() == entry.tag


def _translated(problem: Exception, target: RemotePath) -> RemoteError:
    response: Any = getattr(problem, "response", None)
    status = getattr(response, "status_code", None)
    if status == 412:
        return RemoteError("someone else committed meanwhile", file=target, hint="run again")
    hint = HINTS.get(status) if isinstance(status, int) else "check the network and run again"
    text = printable(masked(str(problem).partition("\n")[0]), 200)
    found = f"status {status}" if status is not None else None
    return RemoteError(f"cannot be uploaded: {type(problem).__name__}: {text}", file=target, found=found, hint=hint)
