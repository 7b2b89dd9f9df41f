"""Draw charts as SVG with the package vl-convert-python (extra `report`), in this process or in a child process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from polyquant.analysis.report import drawing_child
from polyquant.errors import UnsupportedError

__all__ = ["MEASURED", "ChartProcess", "Spec", "draw", "require_packages", "svg"]

Spec = dict[str, Any]
"""A Vega-Lite specification; empty if there is nothing to draw."""
MEASURED = "sans-serif"
"""The font by which the library places text; the page then shows its own, which may be a fifth wider."""

_PACKAGES = {"jinja2": "jinja2", "vl_convert": "vl-convert-python"}
"""Module -> package, of the extra `report`."""


def require_packages() -> None:
    """Raise UnsupportedError without the packages of the extra `report`: ask before long work."""
    for module in _PACKAGES:
        if find_spec(module) is None:
            raise _missing(module)


def _missing(module: str) -> UnsupportedError:
    return UnsupportedError(
        f"reports require the package '{_PACKAGES[module]}'", hint="pip install 'polyquant[report]'"
    )


def svg(spec: Spec) -> str:
    """Draw a chart as SVG of fixed size. Raises UnsupportedError without the package."""
    try:
        return drawing_child.svg(spec)
    except ImportError:
        raise _missing("vl_convert") from None


def draw(spec: Spec, process: ChartProcess | None = None) -> str:
    """Draw a chart as SVG as wide as the page; "" for an empty one. Raises UnsupportedError without the package."""
    if not spec:
        return ""
    drawn = svg(spec) if process is None else process.svg(spec)
    drawn = drawn.replace(f'font-family="{MEASURED}"', 'font-family="inherit"')
    return re.sub(r'^<svg([^>]*?) width="(\d+)" height="\d+"', r'<svg\1 style="max-width:\2px"', drawn, count=1)


class ChartProcess:
    """A child process that draws charts while this process does other work.

    The library takes half a second to start, and holds Python's lock while it starts and draws. If the child cannot
    run, this process draws.
    """

    def __init__(self) -> None:
        self._drawn: dict[str, Future[str | None]] = {}
        self._caller = ThreadPoolExecutor(1)
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> ChartProcess:
        command = [sys.executable, "-P", str(Path(drawing_child.__file__))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        try:
            self._child = subprocess.Popen(  # noqa: S603 - our own program under our own interpreter
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
                text=True, encoding="utf-8",
            )  # fmt: skip
        except OSError:
            self._child = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._caller.shutdown(wait=False, cancel_futures=True)
        if self._child is not None:
            self._child.kill()
            self._caller.shutdown(wait=True)  # its last request ends with the child
            with suppress(BrokenPipeError), self._child:  # what it has not read is not needed
                pass

    def begin(self, spec: Spec) -> None:
        """Start to draw a chart that will be needed; nothing for an empty one."""
        if spec:
            self._request(json.dumps(spec))

    def svg(self, spec: Spec) -> str:
        """Draw a chart as SVG of fixed size. Raises UnsupportedError without the package."""
        drawn = self._request(json.dumps(spec)).result()
        return svg(spec) if drawn is None else drawn

    def _request(self, text: str) -> Future[str | None]:
        if text not in self._drawn:
            self._drawn[text] = self._caller.submit(self._ask, text)
        return self._drawn[text]

    def _ask(self, text: str) -> str | None:
        """The child's answer; None if it has ended."""
        if self._child is None or self._child.stdin is None or self._child.stdout is None:
            return None
        try:
            self._child.stdin.write(text + "\n")
            self._child.stdin.flush()
            answer = self._child.stdout.readline()
        except (OSError, ValueError):  # ValueError: closed
            return None
        return str(json.loads(answer)) if answer.endswith("\n") else None
