"""Repeat failed requests: exponential backoff with full jitter; Retry-After is respected."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from polyquant.errors import RemoteError

__all__ = ["GIVE_UP", "NEVER_REACHED", "FailedRequestError", "repeated"]

ATTEMPTS = 7
FIRST_DELAY = 0.5
"""Upper bound of the first delay in seconds; it doubles with each attempt."""
LONGEST_DELAY = 20.0
LONGEST_WAIT = 120.0
"""Longest Retry-After, in seconds, that is waited for."""
GIVE_UP, NEVER_REACHED = 240.0, 15.0
"""Seconds after which no further attempt begins; the second number is for a server that has not answered yet."""

T = TypeVar("T")


class FailedRequestError(Exception):
    """A request that may succeed if repeated. wait: seconds from Retry-After, None without one."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.wait = reason, wait


def repeated(file: object, attempt: Callable[[], T], doing: str = "read", give_up: float = GIVE_UP) -> T:
    """Call `attempt` until it succeeds. Raises RemoteError after the last FailedRequestError.

    doing: "read" or "written", for messages. give_up: seconds after which no further attempt begins.
    """
    began, tried = time.monotonic(), 0
    while True:
        try:
            return attempt()
        except FailedRequestError as failure:
            tried += 1
            reason, wait = failure.reason, failure.wait
        if wait is not None and wait > LONGEST_WAIT:
            raise RemoteError(
                f"cannot be {doing}: {reason}", file=file, hint=f"the server asks to try again in {wait:.0f} s"
            )
        if tried >= ATTEMPTS or time.monotonic() - began > give_up:
            times = f"{tried} attempts" if tried > 1 else "one attempt"
            raise RemoteError(
                f"cannot be {doing}: {reason} ({times})", file=file, hint="check the network and run again"
            )
        jitter = random.uniform(0, min(LONGEST_DELAY, FIRST_DELAY * 2 ** (tried - 1)))  # noqa: S311 - not a secret
        time.sleep(jitter if wait is None else wait + jitter / 4)
