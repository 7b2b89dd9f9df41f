"""Rules for existing targets: a file that is not part of a model is never lost.

`--overwrite` replaces a file that a known format recognises, an empty file or folder, and a folder that a known format
recognises if it contains only files of such a model. Everything else is rejected by name.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from polyquant.errors import InputError, PlanError, PolyquantError, RemoteError, printable
from polyquant.opening import detect
from polyquant.storage.claims import settle_all
from polyquant.storage.folder import CHECKSUMS
from polyquant.storage.locations import RemotePath, forget
from polyquant.storage.remote.upload_state import publishing
from polyquant.storage.remote.uploads import STREAMING
from polyquant.storage.targets import refuse_present
from polyquant.storage.work_folder import inside_work_folder

__all__ = ["refuse_existing", "refuse_overlap", "refuse_target", "replaceable"]

_SHOWN = 3
_DEPTH = 2
"""Folders of a Trellis v2 model hold one folder per layer."""


def refuse_target(dst: Path, source: Path | None, *, overwrite: bool) -> None:
    """Raise PlanError if writing `dst` would destroy something: the source, a folder around it, or an existing target.

    The unfinished publication of a killed run is completed or rolled back first.
    """
    refuse_overlap(dst, source)
    if not isinstance(dst, RemotePath):
        settle_all(dst.absolute())
    refuse_existing(dst, overwrite=overwrite)


def refuse_overlap(dst: Path, source: Path | None) -> None:
    """Raise PlanError for a target that is, contains or is inside the source, and for unfinished output of a run."""
    if isinstance(dst, RemotePath):
        _refuse_url(dst, source)
        return
    real = Path(os.path.realpath(dst))  # never fails, even for a loop of links
    here = source is not None and not isinstance(source, RemotePath)
    origin = Path(os.path.realpath(source)) if source is not None and here else None  # None: arrays in memory, a URL
    if origin is not None and (real == origin or origin in real.parents or real in origin.parents):
        raise PlanError("target is, contains or is inside the source", file=dst, hint="choose another target")
    if inside_work_folder(real) or (origin is not None and inside_work_folder(origin)):
        raise PlanError("is the unfinished output of a run", file=source or dst, hint="repeat that run to finish it")


def _refuse_url(dst: RemotePath, source: Path | None) -> None:
    """Raise PlanError for a URL that is only read, and one that is, contains or is inside the source."""
    if dst.scheme in ("http", "https"):
        raise PlanError("a web server is only read", file=dst, hint="write to a folder, or to s3://BUCKET/NAME")
    if dst.scheme == "hf":
        raise PlanError(
            "the hub is not written directly", file=dst, hint="write to a folder; `polyquant push` uploads it"
        )
    if len(dst.parts) < (3 if dst.scheme in STREAMING else 2):
        raise PlanError("the URL has no name", file=dst, expected=f"{dst.scheme}://BUCKET/NAME")
    if isinstance(source, RemotePath) and (dst == source or dst in source.parents or source in dst.parents):
        raise PlanError("target is, contains or is inside the source", file=dst, hint="choose another target")


def refuse_existing(dst: Path, *, overwrite: bool) -> None:
    """Raise PlanError for an existing target that may not be overwritten, and for a target in a missing folder."""
    if isinstance(dst, RemotePath):
        if publishing(dst):  # the files of a killed run, which the next one completes
            return
        forget(dst)
    refuse_present(dst, overwrite=overwrite, check=replaceable)


def replaceable(target: Path) -> tuple[str, ...]:
    """Files in the folder `target` that `--overwrite` may remove, () for a file. Raises PlanError if it must not be
    replaced.
    """
    mode = target.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise PlanError(
            "target is a symbolic link and is not overwritten",
            file=target,
            found=target.readlink(),
            hint="name the file itself",
        )
    if stat.S_ISREG(mode) and target.lstat().st_size == 0:
        return ()
    names = _files(target) if stat.S_ISDIR(mode) else []
    if stat.S_ISDIR(mode) and not names:
        return ()
    try:
        form, _ = detect(target)
        own = {*form.own_files(target, names), CHECKSUMS} if names else set()
    except PolyquantError as e:
        if isinstance(e, RemoteError) or (not isinstance(e, InputError) and names):
            raise
        kind = "folder" if names else "file"
        raise PlanError(
            f"target is not a model {kind} and is not overwritten", file=target,
            found=printable(names[0]) if names else None, hint="choose another name, or remove it yourself",
        ) from None  # fmt: skip
    if foreign := [n for n in names if n not in own or not stat.S_ISREG((target / n).lstat().st_mode)]:
        more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
        raise PlanError(
            "target contains files that are not part of a model and is not overwritten", file=target,
            found=", ".join(printable(n, 60) for n in foreign[:_SHOWN]) + more,
            hint="move them away, or choose another name",
        )  # fmt: skip
    return tuple(names)


def _files(folder: Path, prefix: str = "", depth: int = _DEPTH) -> list[str]:
    """All non-folder entries below a folder, as relative names; folders that are too deep or empty count as files."""
    out = []
    if isinstance(folder, RemotePath):
        for path in folder.iterdir():
            inside = _files(path, f"{prefix}{path.name}/", depth - 1) if depth > 1 and path.is_dir() else []
            out += inside or [prefix + path.name]
        return out
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            inside = _files(Path(entry.path), f"{prefix}{entry.name}/", depth - 1) if _walk(entry, depth) else []
            out += inside or [prefix + entry.name]
    return out


def _walk(entry: os.DirEntry[str], depth: int) -> bool:
    return depth > 1 and entry.is_dir(follow_symlinks=False)
