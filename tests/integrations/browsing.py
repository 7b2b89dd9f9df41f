"""Drive the browser without a terminal: press keys, wait for its threads, read the screen."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Awaitable, Callable

from textual.app import App
from textual.pilot import Pilot
from textual.widgets import Input

from polyquant.integrations.tui.app import Browser

_PATIENCE = 30.0


class Driver:
    """The actions of a test in a browser."""

    def __init__(self, app: Browser, pilot: Pilot) -> None:
        self.app, self.pilot = app, pilot

    async def press(self, *keys: str) -> None:
        """Press keys; after each, wait until the screen is up to date."""
        for key in keys:
            await self.pilot.press(key)
            await self.settled()

    async def search(self, pattern: str, *keys: str) -> None:
        """Open the field, replace its content, press keys."""
        await self.press("slash")
        await self.write(pattern)
        await self.press(*keys)

    async def write(self, text: str) -> None:
        """Replace the content of the visible field."""
        self.app.query(Input).last().value = text
        await self.settled()

    async def settled(self) -> None:
        async with asyncio.timeout(_PATIENCE):
            while True:
                await self.pilot.pause()
                if self.app._exit or (self.app.loaded and not self.app.jobs.running()):
                    break
                await asyncio.sleep(0.01)
            await self.pilot.pause()

    @property
    def lines(self) -> list[str]:
        """The screen as text."""
        return lines_of(self.app)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def status(self) -> str:
        return self.app.status


def lines_of(app: App) -> list[str]:
    """The screen as text, from its picture."""
    rows: dict[float, list[tuple[float, str]]] = {}
    pattern = r'<text class="[^"]*-r\d+" x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>'
    for x, y, text in re.findall(pattern, app.export_screenshot(), re.S):
        rows.setdefault(float(y), []).append((float(x), html.unescape(text).replace("\xa0", " ")))
    lines = ("".join(text for _, text in sorted(pieces)) for _, pieces in sorted(rows.items()))
    return [line.rstrip("\n") for line in lines if line != "\n"]


def browse(
    paths: list[object],
    script: Callable[[Driver], Awaitable[None]],
    *,
    size: tuple[int, int] = (80, 24),
    wait: bool = True,
    **options: object,
) -> Browser:
    """Run the script in a browser of these paths."""
    app = Browser([str(path) for path in paths], **options)

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            driver = Driver(app, pilot)
            if wait:
                await driver.settled()
            await script(driver)

    asyncio.run(run())
    assert app.jobs.join(_PATIENCE)
    return app
