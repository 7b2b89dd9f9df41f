"""The report in a browser: complete with the keyboard alone, accessible, without errors and requests."""

from __future__ import annotations

from pathlib import Path

import pytest

import polyquant as pq
from browser.written_pages import test_accessible_in_both_themes, test_fits_the_window  # noqa: F401 - run here
from golden import VECTORS

pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")

SOURCE = VECTORS / "models/tiny-llama-untied/hf"
SPECIAL = "\"<b onclick=alert(1)>{{ 7 * 7 }}&amp;'.gguf"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    from polyquant.analysis.report.gather import gather
    from polyquant.analysis.report.page import page

    folder = tmp_path_factory.mktemp("report")
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    models = [folder / "tiny-q8_0.gguf", folder / SPECIAL, folder / "tiny-q2_k.gguf"]
    for codec, model in zip(("q8_0", "q4_0", "q2_k"), models, strict=True):
        pq.quantize(SOURCE, model, codec=codec)
    file = folder / "report.html"
    file.write_text(page(gather(SOURCE, models, text=text, tokens=300, histograms=2)), encoding="utf-8")
    return file


def test_requests_only_itself(visit, report):
    requests = visit(report).requests
    assert [r for r in requests if not r.startswith("data:")] == [report.resolve().as_uri()]


def test_names_from_files_are_text(visit, report):
    page = visit(report).page
    assert page.locator("b[onclick]").count() == 0
    assert page.locator("#models tbody a", has_text=SPECIAL).count() == 1


def test_tables_sort_with_the_keyboard(visit, report):
    page = visit(report).page
    size = page.locator("#models thead button", has_text="size")
    size.focus()
    for order in ("ascending", "descending"):
        page.keyboard.press("Enter")
        sizes = page.locator("#models tbody tr td:nth-of-type(2)")
        cells = sizes.evaluate_all("cells => cells.map(cell => Number(cell.dataset.value))")
        assert cells == sorted(cells, reverse=order == "descending") and len(set(cells)) == 3
        assert page.locator("#models th[aria-sort]").get_attribute("aria-sort") == order


def test_charts_tell_their_values_to_keyboard_and_pointer(visit, report):
    page = visit(report).page
    chart = page.locator(".chart").first
    chart.focus()
    page.keyboard.press("ArrowRight")
    first = page.locator("#tip").text_content()
    assert page.locator("#tip").is_visible() and "tiny-" in first
    assert page.locator("#status").text_content() == first
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").text_content() != first
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()
    page.locator(".chart .mark-symbol path[aria-label]").first.hover()
    assert "tiny-" in page.locator("#tip").text_content()


def test_everything_is_reached_with_tab(visit, report):
    page = visit(report).page
    wanted = page.evaluate(
        "document.querySelectorAll('a[href], button, .chart, .scroll, summary').length - "
        "[...document.querySelectorAll('details:not([open]) .chart')].length"
    )
    reached = 0
    for _ in range(wanted + 5):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break
        reached += 1
    assert reached == wanted


def test_numbers_are_copied_exactly(visit, report):
    page = visit(report, permissions=["clipboard-read", "clipboard-write"]).page
    cell = page.locator("#models tbody td[data-value]").first
    cell.click()
    assert page.evaluate("navigator.clipboard.readText()") == cell.get_attribute("data-value")
    page.locator("button[data-copy=models]").click()
    rows = page.evaluate("navigator.clipboard.readText()").split("\n")
    assert len(rows) == 4 and all(row.count("\t") == rows[0].count("\t") for row in rows)
    assert cell.get_attribute("data-value") in rows[1].split("\t")


def test_the_theme_button_changes_the_theme(visit, report):
    page = visit(report).page
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_printing_opens_what_is_folded(visit, report):
    page = visit(report).page
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert page.pdf().startswith(b"%PDF")


def test_small_and_fast(visit, report):
    assert report.stat().st_size < 2_000_000
    page = visit(report).page
    timing = page.evaluate("performance.getEntriesByType('navigation')[0].toJSON()")
    assert timing["domInteractive"] < 1000
