"""Checksums of a checkpoint: digests of each tensor's content and of each file.

The digest of a tensor covers its codes and scales, not their layout: the same weights in another container have the
same digest (integrity/content.py defines it). `validate` checks them and names the tensor in which a bit has changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from polyquant.analysis.integrity.files import model_files, sha256_list
from polyquant.analysis.integrity.hashing import file_names, hash_all
from polyquant.analysis.integrity.record import Checksums, is_record
from polyquant.codecs.tl import Tile
from polyquant.formats.progress import shows_progress
from polyquant.formats.steps import Progress
from polyquant.opening import accepted, detect, open_as
from polyquant.storage.locations import is_folder, located
from polyquant.storage.source import refuse_changed
from polyquant.types import Checkpoint

__all__ = ["Checksums", "checksum", "checksums_of", "recorded", "sha256_lines"]


@shows_progress("checksum")
def checksum(
    path: str | os.PathLike[str],
    *,
    ternary_layout: str | None = None,
    tile: Tile | None = None,
    threads: int | None = None,
    progress: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Checksums:
    """Compute the digests of all tensors and files of a checkpoint.

    ternary_layout, tile: as for `validate`; they decide what the codes of I2_S, TL1 and TL2 are. threads: default all
    cores. on_progress gets bytes; each byte is read for its file and for its tensor. Raises InputError.
    """
    return checksums_of(_opened(path, ternary_layout, tile), threads=threads, on_progress=on_progress)


def _opened(path: str | os.PathLike[str], ternary_layout: str | None, tile: Tile | None) -> Checkpoint:
    form, _ = detect(path)
    return open_as(form, path, {"ternary_layout": ternary_layout, "tile": tile})


def checksums_of(
    checkpoint: Checkpoint,
    *,
    threads: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Checksums:
    """The digests of an opened checkpoint. Raises InputError if a file changes meanwhile."""
    files = model_files(checkpoint)
    places = {name: (held or [""])[0] for name, held in file_names(checkpoint.values(), files).items()}
    digests, tensors = hash_all(files, list(checkpoint.values()), places, threads=threads, on_progress=on_progress)
    refuse_changed(checkpoint.opened)
    return Checksums(checkpoint.path, checkpoint.format, tensors, digests)


def sha256_lines(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> str:
    """The SHA-256 of each file of a checkpoint, as lines for `sha256sum --check`. Raises InputError."""
    checkpoint = _opened(path, None, None)
    digests, _ = hash_all(model_files(checkpoint), threads=threads, on_progress=on_progress)
    refuse_changed(checkpoint.opened)
    return sha256_list(digests)


def recorded(
    path: str | os.PathLike[str],
    *,
    ternary_layout: str | None = None,
    tile: Tile | None = None,
    threads: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Checksums:
    """Checksums for a comparison: read from a file that `Checksums.write` wrote, else computed from the checkpoint.

    Options that its format does not have are ignored. Raises InputError.
    """
    if not is_folder(path) and is_record(located(path)):
        return Checksums.read(path)
    options = accepted(detect(path)[0], {"ternary_layout": ternary_layout, "tile": tile})
    return checksum(path, threads=threads, on_progress=on_progress, **options)
