"""Ray: one actor per slot. Without an address, Ray starts on this machine and ends with the conversion."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from polyquant.conversion.engines.cluster import Assignment, Handle, Outcome, Unit, WorkerLostError
from polyquant.conversion.engines.worker import UnitRunner
from polyquant.errors import PlanError

__all__ = ["RayCluster"]


class RayCluster:
    """A `Cluster` of Ray actors."""

    def __init__(self, assignment: Assignment, *, workers: int, address: str | None) -> None:
        """Raises PlanError if Ray cannot be reached or started."""
        self.size = workers
        self._assignment, self._actors = assignment, dict[int, Any]()
        self._started = not ray.is_initialized()
        if self._started:
            options: dict[str, Any] = (
                {"address": address} if address else {"address": "local", "include_dashboard": False}
            )
            if address is None:
                options["num_cpus"] = workers * assignment.threads
            before = signal.getsignal(signal.SIGTERM)
            try:
                ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
            except (RayError, RuntimeError, ConnectionError, ValueError) as problem:
                raise PlanError("Ray does not start", found=_one_line(problem), hint="check --address") from None
            finally:
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, before)  # Ray's own would end the program without a message

    def ready(self, slot: int) -> bool:
        """See Cluster. Ray starts a worker when it is first used."""
        return True

    def submit(self, slot: int, unit: Unit) -> Handle:
        """See Cluster."""
        if slot not in self._actors:
            actor = ray.remote(num_cpus=self._assignment.threads, max_restarts=0)(UnitRunner)
            self._actors[slot] = actor.remote(self._assignment)
        try:
            return self._actors[slot].run.remote(unit)
        except RayError as problem:
            raise WorkerLostError(_one_line(problem)) from None

    def wait(self, handles: Sequence[Handle], timeout: float) -> list[Handle]:
        """See Cluster."""
        if not handles:
            return []
        done, _ = ray.wait(list(handles), num_returns=1, timeout=timeout)
        return list(done)

    def result(self, handle: Handle) -> Outcome:
        """See Cluster."""
        try:
            outcome: Outcome = ray.get(handle)
        except RayError as problem:
            raise WorkerLostError(_one_line(problem)) from None
        return outcome

    def replace(self, slot: int) -> None:
        """See Cluster."""
        if (actor := self._actors.pop(slot, None)) is not None:
            ray.kill(actor, no_restart=True)

    def close(self) -> None:
        """See Cluster."""
        for slot in list(self._actors):
            self.replace(slot)
        if self._started:
            ray.shutdown()


def _one_line(problem: Exception) -> str:
    return next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)[:200]
