"""Dask: one worker process per slot. Without an address, a LocalCluster starts and ends with the conversion."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from typing import Any

import distributed

from polyquant.conversion.engines.cluster import Assignment, Handle, Outcome, Unit, WorkerLostError
from polyquant.conversion.engines.worker import UnitRunner
from polyquant.errors import PlanError

__all__ = ["DaskCluster"]

_kept: dict[str, UnitRunner] = {}
"""In a worker: the job that it is working on."""

_PATIENCE = 60.0
"""Seconds to wait for a worker."""


def _run(key: str, assignment: Assignment, unit: Unit) -> Outcome:
    """In a worker: run a unit, with the files and the plan of earlier units kept open."""
    if key not in _kept:
        _kept.clear()
        _kept[key] = UnitRunner(assignment)
    return _kept[key].run(unit)


class DaskCluster:
    """A `Cluster` of Dask workers."""

    def __init__(self, assignment: Assignment, *, workers: int, address: str | None) -> None:
        """Raises PlanError if no cluster can be reached or started."""
        self.size = workers
        self._assignment = assignment
        self._key = f"{assignment.identity} {assignment.files} {time.time_ns()}"
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        self._local: Any = None
        try:
            if address is None:
                with warnings.catch_warnings(action="ignore"):  # about ports of a dashboard
                    self._local = distributed.LocalCluster(
                        n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None,
                        memory_limit=0, silence_logs=logging.CRITICAL,
                    )  # fmt: skip
            self._client: Any = distributed.Client(self._local or address, timeout=_PATIENCE)
        except (OSError, RuntimeError, ValueError) as problem:
            raise PlanError("Dask does not start", found=str(problem)[:200], hint="check --address") from None
        self._slots: dict[int, str] = {}
        self._where: dict[Any, str] = {}
        self._given_up: set[str] = set()

    def ready(self, slot: int) -> bool:
        """See Cluster. A worker that was replaced takes a moment to start."""
        if slot in self._slots:
            return True
        unused = self._alive() - set(self._slots.values())
        free = unused - self._given_up
        if unused and not free:  # a worker that was given up may be idle by now
            busy = self._client.processing()
            free = {address for address in unused if not busy.get(address)}
        if free:
            self._slots[slot] = min(free)
            self._given_up -= free
        return bool(free)

    def submit(self, slot: int, unit: Unit) -> Handle:
        """See Cluster."""
        address = self._slots[slot]
        future = self._client.submit(
            _run, self._key, self._assignment, unit, workers=[address], allow_other_workers=False, pure=False, retries=0
        )
        self._where[future] = address
        return future

    def _alive(self) -> set[str]:
        return set(self._client.scheduler_info(n_workers=-1)["workers"])

    def wait(self, handles: Sequence[Handle], timeout: float) -> list[Handle]:
        """See Cluster."""
        if not handles:
            return []
        try:
            distributed.wait(list(handles), timeout=timeout, return_when="FIRST_COMPLETED")
        except TimeoutError:
            alive = self._alive()
            return [h for h in handles if h.done() or self._where[h] not in alive]
        return [h for h in handles if h.done()]

    def result(self, handle: Handle) -> Outcome:
        """See Cluster."""
        self._where.pop(handle, None)
        if handle.status != "finished":
            handle.cancel()
            raise WorkerLostError(f"the worker ended: {handle.status}")
        try:
            outcome: Outcome = handle.result(timeout=_PATIENCE)
        except TimeoutError:  # its worker ended before the result was fetched
            handle.cancel()
            raise WorkerLostError("the worker ended before its result was fetched") from None
        return outcome

    def replace(self, slot: int) -> None:
        """See Cluster."""
        address = self._slots.pop(slot, None)
        if address is not None and address in self._alive():
            try:
                self._client.restart_workers([address], timeout=_PATIENCE, raise_for_error=False)
            except ValueError:  # a worker without a nanny cannot be restarted
                self._given_up.add(address)

    def close(self) -> None:
        """See Cluster."""
        self._client.close()
        if self._local is not None:
            self._local.close()
