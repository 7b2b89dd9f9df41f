"""The interface of an engine: some slots, each with one worker process that runs one unit of work at a time."""

from __future__ import annotations

import json
import socket
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, TypeAlias
from urllib.parse import urlsplit

from polyquant.errors import PlanError, UnknownNameError, UnsupportedError

__all__ = ["ENGINES", "Assignment", "Cluster", "Handle", "Outcome", "Unit", "WorkerLostError", "cluster_named"]

Handle: TypeAlias = Any
"""A unit in progress, as the engine refers to it. Hashable."""

Unit: TypeAlias = tuple[tuple[int, int, int], ...]
"""Tasks: (number of the step in the plan, first row, last row + 1); rows (0, -1) are the whole tensor."""

ENGINES = {
    "ray": "polyquant.conversion.engines.ray_cluster:RayCluster",
    "dask": "polyquant.conversion.engines.dask_cluster:DaskCluster",
}
"""Name, also of the extra that installs it -> class."""

_PATIENCE = 5.0
"""Seconds to wait for an answer from the address of a cluster."""


class WorkerLostError(Exception):
    """A worker ended, or does not answer, before its unit was done."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Everything that a worker needs to make the same plan and write into the driver's files.

    request: arguments of `plan`; target: the output's path; files: the folder of the unfinished files; identity: of the
    plan (Plan.identity). folder: the driver's current folder, for relative paths.
    """

    request: Mapping[str, Any]
    target: str
    files: str
    identity: str
    folder: str
    threads: int
    measure: bool
    max_memory: int | str | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a unit: lines for the journal, packed, or an error. transient: another attempt may succeed."""

    packed: bytes = b""
    error: str = ""
    kind: str = ""
    transient: bool = False

    @staticmethod
    def of(lines: Sequence[Mapping[str, Any]]) -> Outcome:
        """The result with these lines, compressed: a unit may have thousands of tensors, each with a long line."""
        return Outcome(zlib.compress("\n".join(map(json.dumps, lines)).encode(), 1))

    def lines(self) -> Iterator[dict[str, Any]]:
        """Unpack the lines one by one."""
        return map(json.loads, zlib.decompress(self.packed).splitlines()) if self.packed else iter(())


class Cluster(Protocol):
    """Workers in numbered slots. A driver uses it from one thread."""

    @property
    def size(self) -> int:
        """Number of slots."""

    def ready(self, slot: int) -> bool:
        """True if the slot has a worker, or gets one now."""

    def submit(self, slot: int, unit: Unit) -> Handle:
        """Let the worker of a slot that is ready run a unit. Raises WorkerLostError."""

    def wait(self, handles: Sequence[Handle], timeout: float) -> list[Handle]:
        """Those of the handles that have ended, after at most `timeout` seconds."""

    def result(self, handle: Handle) -> Outcome:
        """The result of an ended unit. Raises WorkerLostError."""

    def replace(self, slot: int) -> None:
        """End the worker of a slot, which may hang; the next `submit` starts another."""

    def close(self) -> None:
        """End all workers; a cluster that was started here ends, too."""


def cluster_named(name: str, assignment: Assignment, *, workers: int, address: str | None) -> Cluster:
    """Connect to the cluster at an address, or start a local one. Raises UnknownNameError, UnsupportedError with the
    command that installs the engine, PlanError if no cluster answers.
    """
    if name not in ENGINES:
        raise UnknownNameError("engine", name, ENGINES)
    if address is not None:
        _refuse_silent(address)
    module, attribute = ENGINES[name].split(":")
    try:
        found = getattr(import_module(module), attribute)
    except ImportError as problem:
        raise UnsupportedError(
            f"the engine '{name}' is not installed", found=problem.msg, hint=f"pip install 'polyquant[{name}]'"
        ) from None
    made: Cluster = found(assignment, workers=workers, address=address)
    return made


def _refuse_silent(address: str) -> None:
    """Raise PlanError if nothing listens at host:port; other addresses ("auto") are left to the engine."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise PlanError("is not the address of a cluster", expected="HOST:PORT", found=address) from None
    if host is None or port is None:
        if address != "auto":
            raise PlanError("is not the address of a cluster", expected="HOST:PORT, or auto", found=address)
        return
    try:
        socket.create_connection((host, port), timeout=_PATIENCE).close()
    except OSError as problem:
        raise PlanError(
            "no cluster answers", found=f"{address}: {problem.strerror or problem}",
            hint="check --address, or omit it for workers on this machine",
        ) from None  # fmt: skip
