"""Hash files and tensors on several threads, a piece of each in memory at a time.

Each thread hashes one file or one tensor. A file comes before its tensors, so that both are read at about the same
time, and from the disk only once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from polyquant.analysis.integrity.content import TensorDigest, digest_of, files_of
from polyquant.analysis.integrity.files import FileDigest, file_digest
from polyquant.formats.steps import Progress
from polyquant.ops.native import cores
from polyquant.types import Weight

__all__ = ["file_names", "hash_all"]


def file_names(weights: Iterable[Weight], files: Mapping[str, Path]) -> dict[str, list[str] | None]:
    """Tensor -> the names of its files, None if a part is not read from one of `files`."""
    names = {path: name for name, path in files.items()} | {path.resolve(): name for name, path in files.items()}
    out: dict[str, list[str] | None] = {}
    for weight in weights:
        sources = files_of(weight)
        held = [names.get(source.path.absolute()) for source in sources or ()]
        known = [name for name in held if name is not None]
        out[weight.name] = known if known and len(known) == len(held) else None
    return out


def hash_all(
    files: Mapping[str, Path],
    weights: Sequence[Weight] = (),
    places: Mapping[str, str] | None = None,
    *,
    threads: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> tuple[dict[str, FileDigest], dict[str, TensorDigest]]:
    """Digests of files and of weights, by name. places: tensor -> its file. Raises InputError, OSError."""
    of_file: dict[str, list[Weight]] = {}
    for weight in weights:
        of_file.setdefault((places or {}).get(weight.name, ""), []).append(weight)
    total = sum(p.stat().st_size for p in files.values()) + sum(w.nbytes for w in weights)
    tally = _Tally(total, on_progress)
    hashed: dict[str, Future[FileDigest]] = {}
    digests: dict[str, Future[TensorDigest]] = {}
    with ThreadPoolExecutor(threads or cores()) as pool:
        try:
            for name in dict.fromkeys((*files, *of_file)):
                if name in files:
                    hashed[name] = pool.submit(file_digest, files[name], tally.teller(name))
                for weight in of_file.get(name, ()):
                    digests[weight.name] = pool.submit(digest_of, weight, name, tally.teller(weight.name))
            _first_error([*hashed.values(), *digests.values()])
        except BaseException:
            tally.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return {n: f.result() for n, f in hashed.items()}, {w.name: digests[w.name].result() for w in weights}


def _first_error(jobs: Iterable[Future[Any]]) -> None:
    for job in jobs:
        job.result()


class _StoppedError(Exception):
    """Another thread failed, or the run was interrupted."""


class _Tally:
    """Counts the bytes of all threads."""

    def __init__(self, total: int, on_progress: Callable[[Progress], None] | None) -> None:
        self.stop = threading.Event()
        self._total, self._on_progress, self._done = max(1, total), on_progress, 0
        self._started = time.monotonic()
        self._lock = threading.Lock()

    def teller(self, name: str) -> Callable[[int], None]:
        """A function that counts bytes of this file or tensor. Raises _StoppedError after `stop` is set."""

        def tell(nbytes: int) -> None:
            if self.stop.is_set():
                raise _StoppedError
            with self._lock:
                self._done += nbytes
                if self._on_progress is not None:
                    passed = time.monotonic() - self._started
                    self._on_progress(Progress(min(self._done, self._total), self._total, name, passed))

        return tell
