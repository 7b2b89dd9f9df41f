"""Write man/polyquant.1 from the commands, as `--help` has them: PYTHONPATH=src python scripts/man_page.py"""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

from polyquant import __version__
from polyquant.cli import COMMANDS, cli
from site_pages import context_of, examples, sections

__all__ = ["PAGE", "text"]

PAGE = Path(__file__).resolve().parents[1] / "man/polyquant.1"
_END = r"""
.SH EXIT STATUS
.TP
.B 0
Success; for validate: no errors or warnings; for certify: certified.
.TP
.B 1
Findings, nothing to repair, or a failure of the machine, such as a full disk.
.TP
.B 2
Invalid input or request.
.TP
.B 130
Interrupted.
.SH ENVIRONMENT
.TP
.B POLYQUANT_NATIVE
0: use the numpy references instead of the native kernels.
.TP
.B NO_COLOR
Print without colors.
.SH SEE ALSO
.BR llama-quantize (1),
.BR sha256sum (1)
"""


def _roff(words: str) -> str:
    """Escape what roff would interpret."""
    escaped = words.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return "\n".join(f"\\&{line}" if line.startswith(".") else line for line in escaped.splitlines())


def _command(name: str) -> list[str]:
    ctx = context_of(name)
    usage = _roff(" ".join(ctx.command.collect_usage_pieces(ctx)))
    lines = [
        f".SS {name}",
        f".B polyquant {name}",
        usage,
        ".PP",
        _roff(" ".join(inspect.cleandoc(ctx.command.help or "").split())),
    ]
    for title, records in sections(ctx):
        if title != "Options":
            lines += [".PP", f"{_roff(title)}:"]
        for flags, helped in records:
            lines += [".TP", f".B {_roff(flags)}", _roff(helped) or "No argument."]
    if shown := examples(ctx.command):
        lines += [".PP", "Examples:", ".PP", ".nf", ".RS", _roff(shown), ".RE", ".fi"]
    return lines


def text() -> str:
    """The page."""
    about = _roff(" ".join(inspect.cleandoc(cli.help or "").split()))
    lines = [
        f'.TH POLYQUANT 1 "" "polyquant {__version__}" "User Commands"',
        ".SH NAME", r"polyquant \- open, check, compare, convert, quantize and run LLM weights",
        ".SH SYNOPSIS", ".B polyquant", r"[\fB\-\-version\fR] [\fB\-\-help\fR] \fICOMMAND\fR [\fIARGUMENTS\fR]",
        ".SH DESCRIPTION", about, ".PP", "A model is a file, a folder or a URL.",
        r"\fBpolyquant \fICOMMAND\fB \-\-help\fR prints the options of a command.",
        ".SH COMMANDS",
    ]  # fmt: skip
    for name in COMMANDS:
        lines += _command(name)
    return "\n".join(lines) + _END


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE)
    out = parser.parse_args().out
    out.parent.mkdir(exist_ok=True)
    out.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
