'''Read a Modelfile: commands as ollama/parser/parser.go reads them.

    FROM PATH                       the model
    PARAMETER NAME VALUE            may be repeated
    TEMPLATE, SYSTEM, LICENSE TEXT  "..." or """...""" over several lines
    ADAPTER PATH
    MESSAGE ROLE TEXT               role: system, user or assistant
    RENDERER, PARSER, REQUIRES TEXT
    # a comment

Commands are not case-sensitive. A value without quotes ends at the end of its line.
'''

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from polyquant.errors import InputError, printable
from polyquant.storage.source import file_bytes

__all__ = ["Modelfile", "parse", "read"]

_LIMIT = 16 << 20
_COMMANDS = ("from", "parameter", "template", "system", "license", "adapter", "message", "renderer", "parser",
             "requires")  # fmt: skip
_ROLES = ("system", "user", "assistant")
_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)([-+][0-9A-Za-z.+-]+)?", re.ASCII)


@dataclass
class Modelfile:
    """The commands of a Modelfile; None: not in it."""

    model: str | None = None
    adapter: str | None = None
    template: str | None = None
    system: str | None = None
    renderer: str | None = None
    parser: str | None = None
    requires: str | None = None
    licenses: list[str] = field(default_factory=list)
    parameters: list[tuple[str, str]] = field(default_factory=list)
    messages: list[tuple[str, str]] = field(default_factory=list)


def read(path: Path) -> Modelfile:
    """Read a Modelfile; relative paths in it start at its folder. Raises InputError."""
    try:
        text = file_bytes(path, _LIMIT).decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise InputError(f"is not UTF-8 (byte {problem.start})", file=path) from None
    found = parse(text, path)
    for name in ("model", "adapter"):
        value = getattr(found, name)
        if value is not None:
            expanded = Path(value).expanduser()
            setattr(found, name, str(expanded if expanded.is_absolute() else path.parent / expanded))
    return found


def parse(text: str, file: object = None) -> Modelfile:
    """Parse the text of a Modelfile. Raises InputError with the line."""
    out = Modelfile()
    lines = _Lines(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), file)
    while (line := lines.next()) is not None:
        stripped = line.strip(" \t")
        if not stripped or stripped.startswith("#"):
            continue
        command, rest = lines.word(stripped)
        if command.lower() not in _COMMANDS:
            raise lines.error(
                f"the command '{printable(command, 40)}' is not known", ", ".join(c.upper() for c in _COMMANDS)
            )
        _apply(out, command.lower(), rest, lines)
    if out.model is None:
        raise InputError("has no FROM line", file=file, hint="FROM ./model.gguf")
    return out


def _apply(out: Modelfile, command: str, rest: str, lines: _Lines) -> None:
    if command in ("parameter", "message"):
        key, rest = lines.word(rest)
        value = lines.value(rest)
        if command == "parameter":
            out.parameters.append((key, value))
        elif key not in _ROLES:
            raise lines.error(f"the role '{printable(key, 40)}' is not known", ", ".join(_ROLES))
        else:
            out.messages.append((key, value))
        return
    value = lines.value(rest)
    if command == "license":
        out.licenses.append(value)
        return
    name = "model" if command == "from" else command
    if command in ("from", "adapter") and getattr(out, name) is not None:
        raise lines.error(f"a second {command.upper()} line is not supported", "one file")
    if command == "requires":
        if _VERSION.fullmatch(value) is None:
            raise lines.error("REQUIRES is not a version", "for example 0.14.0")
        value = value.removeprefix("v")
    setattr(out, name, value)


class _Lines:
    """The lines of a Modelfile, with the number of the current one for errors."""

    def __init__(self, lines: list[str], file: object) -> None:
        self._lines, self._file, self._at = lines, file, 0

    def next(self) -> str | None:
        """Return the next line, None after the last."""
        if self._at == len(self._lines):
            return None
        self._at += 1
        return self._lines[self._at - 1]

    def error(self, message: str, expected: str) -> InputError:
        """Return an error that names the line."""
        return InputError(f"line {self._at}: {message}", file=self._file, expected=expected)

    def word(self, text: str) -> tuple[str, str]:
        """Split the first word from the rest of a line. Raises InputError if nothing follows it."""
        match = re.match(r"([^ \t]+)[ \t]+(.*)", text, re.DOTALL)
        if match is None:
            raise self.error(f"nothing follows '{printable(text, 40)}'", "a value")
        return match[1], match[2].strip(" \t")

    def value(self, text: str) -> str:
        """Return a value without its quotes; one that is quoted may continue on the next lines. Raises InputError."""
        start = self._at
        for quote in ('"""', '"'):
            if text.startswith(quote):
                while not (text.rstrip(" \t").endswith(quote) and len(text.rstrip(" \t")) >= 2 * len(quote)):
                    following = self.next()
                    if following is None:
                        self._at = start
                        raise self.error(f"the closing {quote} is missing", f"{quote} at the end of a line")
                    text += "\n" + following
                return text.rstrip(" \t")[len(quote) : -len(quote)]
        return text.rstrip(" \t")
