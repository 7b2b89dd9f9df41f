"""hf://org/name[@revision][/file]: model repositories of the Hugging Face hub, or of the server HF_ENDPOINT.

    GET api/models/ORG/NAME/revision/REVISION?blobs=true    the commit, and all files with sizes and hashes: one request
    GET ORG/NAME/resolve/COMMIT/FILE                        a range of a file; large files redirect to their storage

The revision is resolved once, so all files of a model are of one commit, also if someone pushes meanwhile. Endpoint and
token are those of huggingface_hub (HF_ENDPOINT, HF_TOKEN, `hf auth login`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from polyquant.errors import InputError, RemoteError
from polyquant.storage import strict_json
from polyquant.storage.file_state import Entry
from polyquant.storage.locations import RemotePath
from polyquant.storage.remote.extra import missing
from polyquant.storage.remote.http import Resource, open_range, read_range, small_body
from polyquant.storage.remote.names import base_names

__all__ = ["HINTS", "Hub", "repository"]

_ANSWER = 64 << 20
"""Bytes of a listing; 10,000 files take about 4 MB."""
_LISTING = strict_json.Limit(_ANSWER, 4_000_000)
HINTS = {
    401: "check the name; a private repository needs `hf auth login` or HF_TOKEN, and an expired token a new one",
    403: "the token has no access: accept the model's licence on its page, or use another token",
    404: "check the name, the revision and the file",
}


def repository(path: RemotePath) -> tuple[str, str, str]:
    """Return ("org/name", revision, path inside the repository or "")."""
    _, org, name, *inside = path.parts
    name, _, revision = name.partition("@")
    return f"{org}/{name}", unquote(revision) or "main", "/".join(inside)


@dataclass(slots=True)
class _Snapshot:
    """The files of one commit. opened: the server's entries of the files that were read."""

    commit: str
    files: Mapping[str, Entry]
    resources: dict[str, Resource]
    opened: dict[str, Entry]


class Hub:
    """Backend of hf://."""

    def __init__(self, path: RemotePath) -> None:
        try:
            from huggingface_hub import constants, get_token
        except ImportError:
            raise missing("huggingface_hub", path) from None
        if constants.HF_HUB_OFFLINE:
            raise RemoteError("HF_HUB_OFFLINE forbids requests", file=path, hint="unset it, or use a local copy")
        token = get_token()
        self._endpoint = constants.ENDPOINT.rstrip("/")
        self._authorization = f"Bearer {token}" if token else None
        self._snapshots: dict[str, _Snapshot] = {}
        self._lock = threading.Lock()

    def is_folder(self, path: RemotePath) -> bool:
        """Return True for the repository and its folders."""
        entry = self.entry(path)
        return entry is not None and entry.folder

    def entry(self, path: RemotePath) -> Entry | None:
        """Return the entry from the listing of the commit."""
        if len(path.parts) < 3:
            return None
        files, inside = self._snapshot(path).files, repository(path)[2]
        if inside in files:
            return files[inside]
        prefix = f"{inside}/" if inside else ""
        return Entry(0, folder=True) if not inside or any(name.startswith(prefix) for name in files) else None

    def current(self, path: RemotePath) -> Entry | None:
        """Return `entry`: a commit does not change."""
        return self.entry(path)

    def names(self, folder: RemotePath) -> list[str]:
        """List a folder of the commit."""
        inside = repository(folder)[2]
        prefix = f"{inside}/" if inside else ""
        below = (name[len(prefix) :] for name in self._snapshot(folder).files if name.startswith(prefix))
        return sorted(base_names(below, folder))

    def first(self, path: RemotePath, n: int) -> tuple[Entry, bytes]:
        """Read the first bytes. The size must be that of the listing."""
        entry = self.entry(path)
        if entry is None or entry.folder:
            found = "a folder" if entry else None
            raise InputError("is not a file of the repository", file=path, found=found, hint=HINTS[404])
        snapshot, inside = self._snapshot(path), repository(path)[2]
        answer = open_range(self._resource(path), n)
        if answer.entry.size != entry.size:
            raise RemoteError(
                "the size differs from the listing", file=path, expected=entry.size, found=answer.entry.size
            )
        snapshot.opened[inside] = answer.entry
        return entry, answer.data

    def read_into(self, path: RemotePath, entry: Entry, start: int, out: memoryview) -> None:
        """Read one range."""
        opened = self._snapshot(path).opened.get(repository(path)[2])
        read_range(self._resource(path), opened or Entry(entry.size), start, out)

    def files(self, path: RemotePath) -> tuple[str, Mapping[str, Entry]]:
        """Return the commit and all its files."""
        snapshot = self._snapshot(path)
        return snapshot.commit, snapshot.files

    def forget(self, path: RemotePath) -> None:
        """Drop the listing of the revision."""
        name, revision, _ = repository(path)
        with self._lock:
            self._snapshots.pop(f"{name}@{revision}", None)

    def _resource(self, path: RemotePath) -> Resource:
        snapshot, (name, _, inside) = self._snapshot(path), repository(path)
        if inside not in snapshot.resources:
            url = f"{self._endpoint}/{name}/resolve/{snapshot.commit}/{quote(inside)}"
            snapshot.resources[inside] = Resource(path, url, self._authorization, HINTS)
        return snapshot.resources[inside]

    def _snapshot(self, path: RemotePath) -> _Snapshot:
        name, revision, _ = repository(path)
        key = f"{name}@{revision}"
        with self._lock:
            if key not in self._snapshots:
                self._snapshots[key] = self._fetched(path, name, revision)
            return self._snapshots[key]

    def _fetched(self, path: RemotePath, name: str, revision: str) -> _Snapshot:
        root = RemotePath(*path.parts[:3])
        url = f"{self._endpoint}/api/models/{name}/revision/{quote(revision, safe='')}?blobs=true"
        body = small_body(Resource(root, url, self._authorization, HINTS), _ANSWER)
        answer = strict_json.typed(strict_json.parse(body, _LISTING, file=root), dict, "the listing", file=root)
        commit = strict_json.typed(answer.get("sha"), str, "the commit", file=root)
        if not (0 < len(commit) <= 64 and commit.isalnum() and commit.isascii()):
            raise InputError("the listing has an invalid commit", file=root, found=commit[:80])
        siblings = strict_json.typed(answer.get("siblings"), list, "the files", file=root)
        files = dict(_file(sibling, root) for sibling in siblings)
        base_names(files, root)  # refuses names that leave the repository
        return _Snapshot(commit, files, {}, {})


def _file(sibling: Any, root: RemotePath) -> tuple[str, Entry]:
    """Return name and entry of one file of a listing."""
    fields = strict_json.typed(sibling, dict, "a file", file=root)
    name = strict_json.typed(fields.get("rfilename"), str, "a file's name", file=root)
    lfs = fields.get("lfs")
    large = lfs if isinstance(lfs, dict) else {}
    size = strict_json.typed(large.get("size", fields.get("size")), int, "a file's size", file=root)
    if not 0 <= size < 1 << 62:
        raise InputError("the listing has an invalid size", file=root, found=size)
    return name, Entry(size, str(large.get("sha256") or fields.get("blobId") or ""))
