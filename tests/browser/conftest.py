"""Pages in headless Chromium. Log messages and requests are recorded, and fail the test unless it allows them.

Needs Chromium (Debian: apt-get install chromium) and the extra `browser`; skipped without either.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (400, 800, 1280)  # a phone, half a screen, a screen
THEMES = ("light", "dark")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@dataclass
class Visit:
    """An open page, its log messages and its requests."""

    page: Any
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def violations(self) -> list[str]:
        """Return what axe-core finds: rule, impact and the first element of each."""
        axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
        found = axe.Axe().run(self.page).response["violations"]
        return [f"{v['id']} ({v['impact']}): {v['nodes'][0]['html'][:160]}" for v in found]

    def overflow(self) -> int:
        """Return by how many pixels the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Return a function that opens a file or URL; afterwards no page may have logged an error or left its origin."""
    visits: list[tuple[Visit, str]] = []
    with ExitStack() as contexts:

        def open_page(target: str | Path, *, width: int = 1280, theme: str = "light", **options: Any) -> Visit:
            url = target.resolve().as_uri() if isinstance(target, Path) else target
            context = browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme=theme, bypass_csp=False, **options
            )
            contexts.callback(context.close)
            page = context.new_page()
            visit = Visit(page)
            page.on("pageerror", lambda error: visit.problems.append(str(error)))
            page.on("console", lambda m: visit.problems.append(m.text) if m.type in ("error", "warning") else None)
            page.on("request", lambda request: visit.requests.append(request.url))
            page.goto(url)
            visits.append((visit, url))
            return visit

        yield open_page
        for visit, url in visits:
            assert visit.problems == []
            origin = "/".join(url.split("/")[:3])
            assert [r for r in visit.requests if not r.startswith((origin, "data:", "blob:"))] == []
