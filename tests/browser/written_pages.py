"""Properties of every page written as a file: a module of tests imports these and defines the fixture `report`,
the page's file.
"""

from __future__ import annotations

import pytest

from browser.conftest import THEMES, WIDTHS

__all__ = ["test_accessible_in_both_themes", "test_fits_the_window"]


@pytest.mark.parametrize("theme", THEMES)
def test_accessible_in_both_themes(visit, report, theme):
    assert visit(report, theme=theme).violations() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_fits_the_window(visit, report, width):
    assert visit(report, width=width).overflow() == 0
