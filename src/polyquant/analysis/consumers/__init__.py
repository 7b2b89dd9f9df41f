"""Programs that read models: their rejections and wrong results for a file or folder (`validate --target`).

One module per program, with a `CONSUMER`. Its rules come from the program's source, whose version the record names.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

from polyquant.analysis.consumers.model import read_model
from polyquant.analysis.consumers.record import Consumer
from polyquant.errors import PlanError
from polyquant.types import Finding

__all__ = ["NAMES", "codes", "consumer", "consumer_findings"]

NAMES = {
    "vllm": "vllm",
    "sglang": "sglang",
    "transformers": "transformers",
    "mlx": "mlx",
    "llama.cpp": "llama_cpp",
    "ollama": "ollama",
}
"""Name of a consumer -> its module."""


@cache
def consumer(name: str) -> Consumer:
    """The record of a program. Raises KeyError."""
    found: Consumer = import_module(f"{__name__}.{NAMES[name]}").CONSUMER
    return found


def codes() -> dict[str, str]:
    """Code -> explanation of all rules."""
    return {rule.code: rule.explanation for name in NAMES for rule in consumer(name).rules}


def consumer_findings(path: Path, name: str, devices: int = 1) -> Iterator[Finding]:
    """Findings about a model for a program, from headers and small files.

    devices: the number that share each layer (tensor parallelism). Raises InputError, UnsupportedError, and PlanError
    if their number does not matter to this program.
    """
    if devices != 1 and not consumer(name).parallel:
        raise PlanError(f"the checks for {name} do not depend on the number of devices", hint="leave out --tp")
    yield from consumer(name).check(read_model(path), devices)
