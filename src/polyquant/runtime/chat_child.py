"""The program that renders one chat template and ends: started by runtime/chat.py as a process of its own.

A template is a program from strangers. The sandbox keeps it from Python's objects, the limits of the process from time and memory: a timer
on processor time and a cap on the address space that the kernel keeps, whatever the template is doing.

stdin: JSON {"path": sys.path entries, "seconds", "memory", "output", "template", "variables"}; stdout: JSON {"text"} or {"error", "detail"}.
Imports nothing of polyquant, so that it starts fast.
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
        """`{% generation %}` marks an answer in templates that trainers use: its body is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own way to say it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Sandbox(ImmutableSandboxedEnvironment):
        """An attribute that is not for templates is an error at once, not an empty text."""

        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            raise SecurityError(f"attribute '{attribute}' of a {type(obj).__name__}")

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return made


def _render(environment: Any, job: dict[str, Any]) -> dict[str, str]:
    """{"text"} or {"error": kind, "detail"}."""
    pieces, room = [], job["output"]
    try:
        for piece in environment.from_string(job["template"]).generate(**job["variables"]):
            room -= len(piece)
            if room < 0:
                return {"error": "output", "detail": ""}
            pieces.append(piece)
    except MemoryError:
        return {"error": "memory", "detail": ""}
    except Exception as e:  # noqa: BLE001 - whatever an expression of the template raises
        return _told(e)
    return {"text": "".join(pieces)}


def _told(e: Exception) -> dict[str, str]:
    from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

    if isinstance(e, SecurityError):
        return {"error": "reach", "detail": str(e)}
    if isinstance(e, TemplateSyntaxError):
        return {"error": "syntax", "detail": f"line {e.lineno}: {e.message}"}
    if type(e) is TemplateError:  # raise_exception
        return {"error": "refused", "detail": str(e)}
    return {"error": "fails", "detail": f"{type(e).__name__}: {e}"}


def main() -> None:
    """One job from stdin to stdout."""
    job = json.load(sys.stdin)
    sys.path[:0] = job["path"]
    environment = _environment()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # kills
    signal.setitimer(signal.ITIMER_PROF, job["seconds"])
    resource.setrlimit(resource.RLIMIT_AS, (job["memory"], job["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.write(json.dumps(_render(environment, job)))


if __name__ == "__main__":
    main()
