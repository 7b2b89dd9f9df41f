"""The output of --profile."""

from __future__ import annotations

from typing import Any

from polyquant.cli.console import size, table
from polyquant.cli.terminal import say
from polyquant.storage.phases import Profile

__all__ = ["print_profile", "profile_json"]


def print_profile(profile: Profile, seconds: float) -> None:
    """Print a line per phase, longest first. seconds: from the start of the command's work to its end."""
    columns = table("phase", ">seconds", ">share", ">bytes", ">per second")
    for entry in profile_json(profile, seconds)["phases"]:
        taken, nbytes = entry["seconds"], entry["bytes"]
        rate = size(nbytes / taken) if nbytes and taken else ""
        columns.add_row(entry["phase"], f"{taken:.2f}", f"{100 * entry['share']:.1f} %", size(nbytes) if nbytes else "",
                        rate)  # fmt: skip
    columns.show()
    threads = f"{profile.threads} threads" if profile.threads > 1 else "one thread"
    say(f"{seconds:.2f} s with {threads}; seconds of phases are summed over them")


def profile_json(profile: Profile, seconds: float) -> dict[str, Any]:
    """The profile as JSON-compatible values."""
    total = profile.seconds or 1.0
    ordered = sorted(profile.spent.items(), key=lambda item: -item[1].seconds)
    return {
        "seconds": seconds,
        "threads": profile.threads,
        "phases": [
            {"phase": name, "seconds": s.seconds, "share": s.seconds / total, "bytes": s.nbytes, "count": s.count}
            for name, s in ordered
        ],
    }
