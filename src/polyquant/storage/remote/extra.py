"""Optional packages for URLs: the error for a missing one."""

from __future__ import annotations

from polyquant.errors import RemoteError

__all__ = ["missing"]


def missing(package: str, file: object) -> RemoteError:
    """Return the error for a URL whose package is not installed."""
    return RemoteError(
        f"needs a package that is not installed: {package}", file=file, hint="pip install 'polyquant[remote]'"
    )
