"""Work in threads: progress and results arrive as messages, and Escape cancels.

Threads are daemons that the application does not wait for: a server that does not answer must not delay quitting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from textual.message import Message
from textual.message_pump import MessagePump

__all__ = ["Cancelled", "Done", "Job", "Jobs", "Progressed"]

_EVERY = 0.1
"""Seconds between two reports of progress."""


class Cancelled(Exception):  # noqa: N818 - not an error
    """Raised in the thread of a cancelled job by `tick`."""


class Progressed(Message):
    """A job is running."""

    def __init__(self, job: Job, share: float, what: str) -> None:
        super().__init__()
        self.job, self.share, self.what = job, share, what


class Done(Message):
    """A job ended. problem: the exception that it raised."""

    def __init__(self, job: Job, result: Any, problem: Exception | None) -> None:
        super().__init__()
        self.job, self.result, self.problem = job, result, problem


class Job:
    """One piece of work in a thread. kind: a new job of the same kind cancels this one.

    then, failed: called by the application with the result, or with the message of an expected error.
    """

    def __init__(
        self,
        owner: MessagePump,
        kind: str,
        title: str,
        work: Callable[[Job], Any],
        then: Callable[[Any], None],
        failed: Callable[[str], None] | None = None,
    ) -> None:
        self.owner, self.kind, self.title, self.work, self.then, self.failed = owner, kind, title, work, then, failed
        self.cancelled = threading.Event()
        self._told = 0.0
        self.thread = threading.Thread(target=self._run, name=f"browse {kind}", daemon=True)

    def tick(self, done: int, total: int, what: str = "") -> None:
        """Report progress, at most every _EVERY seconds. Raises Cancelled."""
        if self.cancelled.is_set():
            raise Cancelled
        now = time.monotonic()
        if now - self._told >= _EVERY:
            self._told = now
            self.owner.post_message(Progressed(self, done / max(1, total), what))

    def send(self, target: MessagePump, message: Message) -> None:
        """Post an intermediate result. Raises Cancelled."""
        if self.cancelled.is_set():
            raise Cancelled
        target.post_message(message)

    def _run(self) -> None:
        result, problem = None, None
        try:
            result = self.work(self)
        except Cancelled:
            self.cancelled.set()
        except Exception as error:  # noqa: BLE001 - shown by the application, or raised again there
            problem = error
        self.owner.post_message(Done(self, result, problem))


class Jobs:
    """The running jobs, one of each kind."""

    def __init__(self) -> None:
        self._running: dict[str, Job] = {}

    def start(self, job: Job) -> None:
        """Start a job; the last one of its kind is cancelled."""
        if job.kind in self._running:
            self._running[job.kind].cancelled.set()
        self._running[job.kind] = job
        job.thread.start()

    def ended(self, job: Job) -> bool:
        """Forget a job. Returns False if it was cancelled or replaced."""
        current = self._running.get(job.kind) is job
        if current:
            del self._running[job.kind]
        return current and not job.cancelled.is_set()

    def cancel(self) -> list[str]:
        """Cancel all jobs; returns their titles."""
        for job in self._running.values():
            job.cancelled.set()
        titles = [job.title for job in self._running.values()]
        self._running.clear()
        return titles

    def running(self, kind: str | None = None) -> bool:
        """True if a job (of this kind) runs."""
        return bool(self._running) if kind is None else kind in self._running

    def join(self, seconds: float) -> bool:
        """Cancel all jobs and wait for them at most this long. Returns False if one still runs."""
        threads = [job.thread for job in self._running.values()]
        self.cancel()
        until = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)
