"""The causes that a wrong tensor may have, as values. report.py makes findings of them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Cause"]


@dataclass(frozen=True, slots=True)
class Cause:
    """code: of the finding. message: without the tensor's name. holds: the tensor whose values are stored here
    instead, if it is whole.
    """

    code: str
    message: str
    holds: str = ""
