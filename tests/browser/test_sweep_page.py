"""The page of a sweep in a browser: accessible, fits the window, with candidates that have no figures."""

from __future__ import annotations

from pathlib import Path

import pytest

import polyquant as pq
from browser.written_pages import test_accessible_in_both_themes, test_fits_the_window  # noqa: F401 - run here
from sweep.conftest import SOURCE, quick

pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")


@pytest.fixture(scope="module")
def report(browser, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        result = pq.sweep(
            SOURCE, text=folder / "text.txt", work=folder / "work", recipes=["q8_0", "q2_k", "mxfp4", "i2_s"]
        )
    result.write_report(folder / "report.html")
    return folder / "report.html"


def test_speeds_are_shown_and_sorted(visit, report):
    page = visit(report).page
    assert page.locator(".chart[aria-label^='Size against speed'] [role='graphics-symbol'][aria-label]").count() >= 4
    page.locator("#models thead button", has_text="memory").click()
    names = page.locator("#models tbody th a").all_text_contents()
    assert sorted(names) == ["mxfp4", "q2_k", "q8_0"]
    assert "ternary" in page.locator("#left-out tbody").inner_text()
