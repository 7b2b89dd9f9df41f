"""Sections of options in `--help`."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["SPEED", "GroupedCommand", "GroupedOption"]

SPEED = "Speed and memory"
_GENERAL = "Options"


class GroupedOption(click.Option):
    """An option with the title of its section in `--help`."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help groups options into sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write sections in the order of their first option."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(param, "group", _GENERAL), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)
