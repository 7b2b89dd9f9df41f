"""Draw charts: a Vega-Lite specification in, SVG out. Also a program, the child process of drawing.py.

The program reads one JSON specification per line and answers each with a line, the SVG as JSON. It does not import
polyquant, so that it starts at once.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

__all__ = ["svg"]

_VERSION = "5.20"  # of Vega-Lite; charts.SCHEMA is its schema
_LONG = re.compile(r"(\.\d\d)\d+")


def svg(spec: dict[str, Any]) -> str:
    """Draw a chart as SVG of fixed size. Raises ImportError without the package vl-convert-python."""
    import vl_convert

    drawn: str = vl_convert.vegalite_to_svg(spec, vl_version=_VERSION)
    drawn = re.sub(r' (?:d|transform)="[^"]*"', lambda m: _LONG.sub(r"\1", m[0]), drawn)  # hundredths of a pixel
    return drawn.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "", 1)


if __name__ == "__main__":
    svg({"mark": "rect", "data": {"values": [{}]}})  # loads the library before the first request
    for line in sys.stdin:
        print(json.dumps(svg(json.loads(line))), flush=True)
