"""The help screen."""

from __future__ import annotations

from polyquant.integrations.tui.screens import Viewer
from polyquant.integrations.tui.sources import Text

__all__ = ["help_screen"]

_TEXT = """\
Everywhere
  1 2 3 4 5    the panes; also Tab and a click on the name
  arrows, j k, Page Up, Page Down, Home, End, mouse wheel
  /            search: words, a glob such as *attn_q*, or re:REGEX
  y            copy the name, value or finding
  m            with three or more models: show the next one as B
  d            dark or light
  Escape       cancel a running job; clear the search
  ?  q         help, quit

Tensors
  Enter        open or close a group; measure a sample of a tensor
  a            measure all values of the tensor
  right left   open, close a group;  + -  open, close all groups
  t            tree or flat list
  f            show one type only
  s  r         sort, reverse; also a click on the head of a column
  Y            copy the row
  c            two models: error of B against A in this tensor or group
  C            the same for all tensors that are shown, worst first

Metadata
  Enter        the whole value: arrays by index, long texts wrapped
  x            two models: only the keys whose values differ
  Y            copy the key

Tokenizer      type an id, a token or text; Enter: to the list, and
               there it copies a token

Findings
  v  V         check headers and small files; check all data
  Enter        explain a finding

Only headers are read until you request more, and reading never
blocks the screen. Names and values from files are shown and copied
with their control characters escaped."""


def help_screen() -> Viewer:
    """Return the screen."""
    return Viewer(Text("Keys", _TEXT))
