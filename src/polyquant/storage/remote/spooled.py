"""Output to the other URLs of fsspec, which have no common way to write parts in any order.

The output is written to this machine, in the folder of upload_state.py, and its files are sent when it is complete. A
stored object becomes visible at once; on file servers a file is sent under a temporary name and then renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from polyquant.storage.locations import RemotePath, forget
from polyquant.storage.remote.objects import Objects
from polyquant.storage.remote.retry import FailedRequestError
from polyquant.storage.remote.upload_state import state_folder
from polyquant.storage.remote.uploads import file_urls, publication_order, refuse_existing
from polyquant.storage.staging import Replaceable, Staging, staged
from polyquant.storage.work_folder import Resume
from polyquant.types import Layout

__all__ = ["spool_path", "staged_spooled"]

_AT_ONCE = frozenset({"gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "memory"})
"""Schemes of object stores: an object appears only when complete."""


def spool_path(target: RemotePath) -> Path:
    """The place of the output on this machine."""
    return state_folder(target) / target.name


@contextmanager
def staged_spooled(
    dst: RemotePath,
    layout: Layout,
    fingerprint: str,
    *,
    resume: Resume = "auto",
    replaceable: Replaceable | None = None,
    check: Callable[[], None] | None = None,
) -> Iterator[Staging]:
    """Write `layout` to this machine, and send it to `dst` when the block ends without an error.

    The arguments are those of `storage.staging.staged`.
    """
    local, urls = spool_path(dst), file_urls(dst, layout)
    refuse_existing(dst, layout, urls, replaceable)
    local.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove(local, layout)  # of a run that was killed after it had sent everything
    written: list[Staging] = []

    def send() -> None:
        if check is not None:
            check()
        refuse_existing(dst, layout, urls, replaceable)
        store = Objects(dst)
        for i in (i for group in publication_order(layout) for i in group):
            _send(store, written[0].folder / layout.files[i].name, urls[i], layout.files[i].size)

    with staged(local, layout, fingerprint, resume=resume, check=send) as staging:
        written.append(staging)
        yield staging
    _remove(local, layout)
    with suppress(OSError):
        local.parent.rmdir()
    forget(dst if layout.folder else dst.parent)


def _send(store: Objects, file: Path, url: RemotePath, size: int) -> None:
    """Send one file. Raises RemoteError."""

    def ask(fs: Any, inside: str) -> None:
        folder, _, name = inside.rpartition("/")
        if url.scheme in _AT_ONCE:
            fs.put_file(str(file), inside)
        else:
            fs.makedirs(folder, exist_ok=True)
            fs.put_file(str(file), f"{folder}/.{name}.polyquant-unfinished")
            fs.mv(f"{folder}/.{name}.polyquant-unfinished", inside)
        fs.invalidate_cache(folder)
        if (there := fs.info(inside)["size"]) != size:
            raise FailedRequestError(f"the server has stored {there} of {size} bytes")

    store.call(url, ask, doing="written")


def _remove(local: Path, layout: Layout) -> None:
    """Remove the output from this machine."""
    with suppress(FileNotFoundError):
        if not layout.folder:
            for name in {local.name} if len(layout.files) == 1 else {f.name for f in layout.files}:
                (local.parent / name).unlink(missing_ok=True)
            return
        for f in layout.files:
            (local / f.name).unlink(missing_ok=True)
        for sub in {f.name.rpartition("/")[0] for f in layout.files} - {""}:
            (local / sub).rmdir()
        local.rmdir()
