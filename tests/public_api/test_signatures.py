"""Keywords that help() and type checkers see are those that the functions take."""

from __future__ import annotations

import inspect
import os
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import polyquant as pq
from polyquant.options import options_of
from polyquant.registry import FORMATS, format_named

ROOT = Path(__file__).resolve().parents[2]
FORM = [format_named(name) for name in FORMATS]
OPENING = {name for form in FORM for name in options_of(form.open_options)}
WRITING = {name for form in FORM for name in options_of(form.target.options)}


def test_keywords_are_those_of_the_option_classes():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_keywords.py", "--check"],
        env={**os.environ, "PYTHONPATH": str(Path(pq.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("function", [pq.plan, pq.convert, pq.quantize, pq.save], ids=lambda f: f.__name__)
def test_every_option_is_a_parameter(function):
    parameters = inspect.signature(function).parameters
    assert parameters.keys() >= OPENING | WRITING | {"codec", "recipe", "rules", "requantize"}
    assert parameters["bits"].default is None and str(parameters["bits"].annotation) == "int | None"
    assert parameters["keep"].default == ()
    assert {p.kind for p in parameters.values()} >= {inspect.Parameter.KEYWORD_ONLY}


def test_open_takes_the_options_of_sources():
    assert inspect.signature(pq.open).parameters.keys() - {"path", "plugin_options"} == OPENING


def test_help_shows_types_and_defaults():
    text = pydoc.plain(pydoc.render_doc(pq.convert))
    assert (
        "codec: str | None = None" in text and "overwrite: bool = False" in text and "bits: int | None = None" in text
    )


@pytest.mark.parametrize(
    "name", [n for n in pq.__all__ if n[0].islower() and n not in ("codecs", "formats", "recipes")]
)
def test_no_function_hides_its_parameters(name):
    hidden = [p.name for p in inspect.signature(getattr(pq, name)).parameters.values() if p.kind is p.VAR_KEYWORD]
    assert set(hidden) <= {"plugin_options", "options"}
    assert hidden != ["options"] or name == "codec"  # whose options are those of the codec that is named


def test_unknown_keywords_are_type_errors():
    with pytest.raises(TypeError, match="unexpected keyword argument 'bit'; did you mean 'bits'"):
        pq.plan("x", "gguf", bit=3)
