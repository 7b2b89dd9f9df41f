"""Calibration that several processes share: whoever comes first runs a shard of the text through a layer, once.

The processes have a folder in common. What a shard gathers in a stage, and the states that it hands to the next one,
are files there; a stage is a barrier, since its sums need every shard. Who computes a shard holds a claim, a file whose
time it renews; an old claim is taken over, so a process that ended or hangs costs a lease at most. Two processes that
compute the same write the same. Missing or damaged files are computed again.

    KEY-STAGE-states-SHARD.json    KEY-STAGE-shard-SHARD.json    KEY-STAGE-sum.json    KEY-STAGE-used-NUMBER.json
    KEY-....N.array                KEY-....claim

KEY is a hash of the kind of statistics. A .json file lists numbers and the .array files with its arrays, and is written
last. The Hessians of a stage, gigabytes in a large model, are removed when every tensor that needs them is quantized:
each process notes those that it has used, two stages later or when it ends.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from polyquant.calibration.hessians import G, GatheringStages, Moments, Tick
from polyquant.calibration.stages import DecoderStages, States, calibration_stages, merge
from polyquant.calibration.statistics import CacheRanges
from polyquant.ops.arithmetic import defined_order

__all__ = ["Kept", "SharedCalibration", "SharedStages"]

_KEPT = 2
"""Stages whose Hessians are kept although this process is done with them: a lost one may repeat its last tensors."""
_LEASE, _RENEWAL, _PAUSE = 30.0, 3.0, 0.1
"""Seconds after which a claim is old, between two renewals, and between two checks for results of others."""


class Kept(Protocol):
    """A Gatherer that can be stored: as numbers, lists and arrays."""

    def parts(self) -> dict[str, Any]:
        """Return the gathered values; arrays that several share are stored once."""

    @classmethod
    def restored(cls, parts: Mapping[str, Any]) -> Any:
        """The inverse of `parts`."""


class SharedCalibration:
    """The calibration of a job in a folder that its processes share; models stay open for the next task."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[Any, GatheringStages] = {}

    def finish(self) -> None:
        """Note that the tensors requested so far are quantized, so that their Hessians may be removed."""
        for stages in self._made.values():
            if isinstance(stages, SharedStages):
                stages.finish()

    def stages(self, path: str | os.PathLike[str], text: str | os.PathLike[str], **size: int) -> GatheringStages:
        """Like `calibration_stages`, shared if the built-in decoder runs the model. Raises InputError,
        UnsupportedError.
        """
        key = os.fspath(path), os.fspath(text), *size.items()
        if key not in self._made:
            stages = calibration_stages(path, text, **size)
            self._made[key] = SharedStages(stages, self._folder) if isinstance(stages, DecoderStages) else stages
        return self._made[key]


class SharedStages:
    """Stages (calibration.hessians) whose results come from a folder. Used by one thread at a time."""

    def __init__(self, stages: DecoderStages, folder: Path) -> None:
        self._stages, self._folder = stages, folder
        self._requests: frozenset[str] | None = None
        self._chain: _Chain | None = None
        folder.mkdir(mode=0o700, exist_ok=True)

    @property
    def names(self) -> Sequence[Sequence[str]]:
        """See Stages."""
        return self._stages.names

    def expect(self, requests: frozenset[str]) -> None:
        """See Stages."""
        self.finish()
        self._requests, self._chain = requests, None

    def finish(self) -> None:
        """Note that the expected tensors of all stages so far are quantized."""
        self._used(len(self._stages.names))

    def _used(self, stop: int) -> None:
        if self._chain is not None and self._requests is not None:
            for index, names in enumerate(self._stages.names[: max(0, stop)]):
                self._chain.use(index, self._requests & frozenset(names))

    def run(self, index: int, wanted: frozenset[str], tick: Tick) -> Mapping[str, Moments]:
        """See Stages."""
        self._chain = self._chain_of(wanted, Moments, None)
        self._used(index - _KEPT)
        asked = self._requests is None or self._requests.intersection(self._stages.names[index])
        if not asked and self._chain.used(index):
            tick(1)
            return {}
        return self.gather(index, wanted, tick, Moments)

    def gather(
        self, index: int, wanted: frozenset[str], tick: Tick, make: Callable[[int], G], cache: CacheRanges | None = None
    ) -> Mapping[str, G]:
        """See GatheringStages. Computes the unclaimed shards, and waits for the others."""
        chain = self._chain_of(wanted, make, cache)
        with defined_order():
            found, ranges = chain.stage(index, tick)
        if cache is not None and ranges is not None:
            cache.merge(ranges)
        tick(1)
        return found

    def _chain_of(self, wanted: frozenset[str], make: Callable[[int], G], cache: CacheRanges | None) -> _Chain:
        if cache is None and self._chain is not None and self._chain.gathers(wanted, make):
            return self._chain
        return _Chain(self._stages, self._folder, wanted, make, cache)


class _Chain:
    """The stages for one kind of statistics."""

    def __init__(
        self, stages: DecoderStages, folder: Path, wanted: frozenset[str], make: Callable[[int], Any],
        cache: CacheRanges | None,
    ) -> None:  # fmt: skip
        self._stages, self._wanted, self._make, self._cache = stages, wanted, make, cache
        kind = f"{getattr(make, '__name__', make)} {None if cache is None else cache.before} {sorted(wanted)}"
        self._store = _Store(folder, hashlib.sha256(kind.encode()).hexdigest()[:8])
        self._noted: dict[int, frozenset[str]] = {}

    def gathers(self, wanted: frozenset[str], make: Callable[[int], Any]) -> bool:
        """True if this is the chain for these tensors, without ranges of a cache."""
        return self._cache is None and make is self._make and wanted == self._wanted

    def used(self, index: int) -> bool:
        """True if the sum of a stage was used by all, and removed."""
        total = self._store.load(f"{index}-sum")
        return total is not None and "used" in total

    def use(self, index: int, names: frozenset[str]) -> None:
        """Note that these tensors of a stage are quantized; after the last ones of all, remove the sum."""
        if not names - self._noted.get(index, frozenset()):
            return
        self._noted[index] = names
        self._store.save(f"{index}-used-{secrets.token_hex(4)}", sorted(names))
        done = {name for note in self._store.named(f"{index}-used-") for name in self._store.load(note) or ()}
        if done >= self._wanted.intersection(self._stages.names[index]):
            self._store.save(f"{index}-sum", {"used": True})
            self._store.remove_arrays(f"{index}-sum")

    def stage(self, index: int, tick: Tick) -> tuple[dict[str, Any], CacheRanges | None]:
        """The sum of all shards of a stage."""
        shards = range(len(self._stages.shards))
        if self.used(index):  # by a process that was lost before its tensors were recorded
            self._noted.pop(index, None)
            for name in (*self._store.named(f"{index}-used-"), f"{index}-sum"):
                self._store.remove(name)
        while (total := self._store.load(f"{index}-sum")) is None:
            missing = [s for s in shards if not self._store.has(f"{index}-shard-{s}")]
            tick(1 - len(missing) / len(shards))
            work = [f"{index}-shard-{s}" for s in missing] or [f"{index}-sum"]
            for name in work:
                with self._store.claimed(name) as ours:
                    if ours and missing:
                        self._shard(index, int(name.rpartition("-")[2]))
                    elif ours:
                        self._sum(index)
                if ours:
                    break
            else:
                tick(1 - len(missing) / len(shards))
                time.sleep(_PAUSE)
        return self._restored(total)

    def _states(self, index: int, shard: int) -> States:
        """The inputs of a stage: stored, or computed again from the previous one."""
        if index == 0:
            return self._stages.first(self._stages.shards[shard])
        stored = self._store.load(f"{index}-states-{shard}")
        if stored is not None:
            return [(x, {int(k): tuple(v) for k, v in passing.items()}) for x, passing in stored]
        before = self._states(index - 1, shard)
        return self._stages.advance(index - 1, before, frozenset(), lambda _: None, self._make, None)[0]

    def _shard(self, index: int, shard: int) -> None:
        cache = None if self._cache is None else CacheRanges(before=self._cache.before)
        before = [(x.copy(), passing) for x, passing in self._states(index, shard)]
        after, gathered = self._stages.advance(index, before, self._wanted, lambda _: None, self._make, cache)
        if after:
            kept = [[x, {str(k): list(v) for k, v in passing.items()}] for x, passing in after]
            self._store.save(f"{index + 1}-states-{shard}", kept)
        self._store.save(f"{index}-shard-{shard}", _parts(gathered, cache))

    def _sum(self, index: int) -> None:
        """Add the shards in order, then remove their files and the states that no stage needs."""
        total: dict[str, Any] = {}
        ranges = None if self._cache is None else CacheRanges(before=self._cache.before)
        for shard in range(len(self._stages.shards)):
            stored = self._store.load(f"{index}-shard-{shard}")
            if stored is None:  # damaged, and removed: computed again
                return
            gathered, cache = self._restored(stored)
            merge(total, gathered)
            if ranges is not None and cache is not None:
                ranges.merge(cache)
        self._store.save(f"{index}-sum", _parts(total, ranges))
        for shard in range(len(self._stages.shards)):
            self._store.remove(f"{index}-shard-{shard}")
            self._store.remove(f"{index}-states-{shard}")

    def _restored(self, stored: Mapping[str, Any]) -> tuple[dict[str, Any], CacheRanges | None]:
        gatherers = [type(self._make(1)).restored(parts) for parts in stored["gatherers"]]
        cache = stored["cache"]
        return (
            {name: gatherers[n] for name, n in stored["names"].items()},
            None if cache is None else CacheRanges.restored(cache),
        )


def _parts(gathered: Mapping[str, Any], cache: CacheRanges | None) -> dict[str, Any]:
    """Gatherers as numbers, lists and arrays; one that several tensors share appears once."""
    numbers: dict[int, int] = {}
    gatherers: list[dict[str, Any]] = []
    for found in gathered.values():
        if id(found) not in numbers:
            numbers[id(found)] = len(gatherers)
            gatherers.append(found.parts())
    names = {name: numbers[id(found)] for name, found in gathered.items()}
    return {"names": names, "gatherers": gatherers, "cache": None if cache is None else cache.parts()}


class _Store:
    """Trees of numbers, lists and arrays in files, each visible only when complete."""

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._key = folder, key

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._key}-{name}"

    def has(self, name: str) -> bool:
        return self._path(f"{name}.json").exists()

    def load(self, name: str) -> Any:
        """A tree, with its arrays as read-only maps; None if it is missing or damaged (and then removed)."""
        try:
            text = self._path(f"{name}.json").read_text(encoding="utf-8")
            return json.loads(text, object_hook=self._array)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError):
            self.remove(name)
            return None

    def _array(self, entry: dict[str, Any]) -> Any:
        if entry.keys() != {"array", "shape", "dtype"}:
            return entry
        path, shape, dtype = self._path(Path(entry["array"]).name), tuple(entry["shape"]), np.dtype(entry["dtype"])
        if path.stat().st_size != math.prod(shape) * dtype.itemsize:
            raise ValueError("another array")
        return np.memmap(path, dtype, "r", shape=shape) if math.prod(shape) else np.empty(shape, dtype)

    def save(self, name: str, tree: Any) -> None:
        """Write a tree: the arrays first, each array once."""
        arrays: dict[int, tuple[str, Any]] = {}

        def stored(value: Any) -> dict[str, Any]:
            if not isinstance(value, np.ndarray):
                raise TypeError(type(value).__name__)
            if id(value) not in arrays:
                arrays[id(value)] = f"{name}.{len(arrays)}.array", value
                self._write(arrays[id(value)][0], np.ascontiguousarray(value).tofile)
            return {"array": arrays[id(value)][0], "shape": list(value.shape), "dtype": value.dtype.str}

        text = json.dumps(tree, default=stored)
        self._write(f"{name}.json", lambda file: file.write(text.encode()))

    def _write(self, name: str, write: Callable[[Any], object]) -> None:
        path = self._path(name)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
        with draft.open("xb") as file:
            write(file)
        draft.replace(path)

    def remove(self, name: str) -> None:
        """Remove a tree: its list first."""
        self._path(f"{name}.json").unlink(missing_ok=True)
        self.remove_arrays(name)

    def remove_arrays(self, name: str) -> None:
        """Remove the arrays of a tree."""
        for path in self._folder.glob(f"{self._key}-{name}.*.array"):
            path.unlink(missing_ok=True)

    def named(self, start: str) -> list[str]:
        """The trees whose names start like this."""
        return [p.stem.removeprefix(f"{self._key}-") for p in self._folder.glob(f"{self._key}-{start}*.json")]

    @contextmanager
    def claimed(self, name: str) -> Iterator[bool]:
        """Claim a piece of work within the block, and renew the claim; False if another process holds it."""
        path = self._path(f"{name}.claim")
        if not self._take(path):
            yield False
            return
        stop = threading.Event()

        def renew() -> None:
            while not stop.wait(_RENEWAL):
                with suppress(OSError):
                    os.utime(path)

        renewing = threading.Thread(target=renew, daemon=True)
        renewing.start()
        try:
            yield True
        finally:
            stop.set()
            renewing.join()
            path.unlink(missing_ok=True)

    def _take(self, path: Path) -> bool:
        """Create the file of a claim; one that was not renewed for long is removed first."""
        for _ in range(2):
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                return True
            except FileExistsError:
                pass
            try:
                old = self._now() - path.stat().st_mtime > _LEASE
            except FileNotFoundError:
                continue
            if not old:
                return False
            path.unlink(missing_ok=True)
        return False

    def _now(self) -> float:
        """The time of the file system, which may be another machine's."""
        probe = self._folder / f"{self._key}-{os.getpid()}.probe"
        probe.touch()
        return probe.stat().st_mtime
