"""The program that renders one chat template and exits: run by runtime/chat.py in a separate process.

A template is untrusted code. The sandbox restricts its access to Python objects; the kernel enforces a timer on
processor time and, except on macOS, a cap on the address space.

stdin: JSON {"path": sys.path entries, "seconds", "memory", "output", "template", "variables"};
stdout: JSON {"text"} or {"error", "detail"}.
Imports nothing from polyquant, for a fast start.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks an answer in templates for training: its body is rendered unchanged."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 requires

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Sandbox(ImmutableSandboxedEnvironment):
        """Raise an error for a forbidden attribute instead of rendering an empty string."""

        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            raise SecurityError(f"attribute '{attribute}' of a {type(obj).__name__}")

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return sandbox


def _render(environment: Any, job: dict[str, Any]) -> dict[str, str]:
    """Return {"text"} or {"error": kind, "detail"}."""
    pieces, remaining = [], job["output"]
    try:
        for piece in environment.from_string(job["template"]).generate(**job["variables"]):
            remaining -= len(piece)
            if remaining < 0:
                return {"error": "output", "detail": ""}
            pieces.append(piece)
    except MemoryError:
        return {"error": "memory", "detail": ""}
    except Exception as e:  # noqa: BLE001 - template expressions can raise anything
        return _error(e)
    return {"text": "".join(pieces)}


def _error(e: Exception) -> dict[str, str]:
    from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

    if isinstance(e, SecurityError):
        return {"error": "reach", "detail": str(e)}
    if isinstance(e, TemplateSyntaxError):
        return {"error": "syntax", "detail": f"line {e.lineno}: {e.message}"}
    if type(e) is TemplateError:  # raise_exception
        return {"error": "refused", "detail": str(e)}
    return {"error": "fails", "detail": f"{type(e).__name__}: {e}"}


def main() -> None:
    """Process one job from stdin to stdout."""
    job = json.load(sys.stdin)
    sys.path[:0] = job["path"]
    environment = _environment()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # terminates the process
    signal.setitimer(signal.ITIMER_PROF, job["seconds"])
    if sys.platform != "darwin":  # macOS reserves far more address space for every process, and refuses a smaller limit
        resource.setrlimit(resource.RLIMIT_AS, (job["memory"], job["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.write(json.dumps(_render(environment, job)))


if __name__ == "__main__":
    main()
