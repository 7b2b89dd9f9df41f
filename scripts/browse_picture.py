"""Draw docs/images/browse.svg: the browser with two models of the tests. python scripts/browse_picture.py [OUTPUT]"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from contextlib import chdir
from pathlib import Path

import polyquant
from polyquant.analysis.demo import demo_model
from polyquant.integrations.tui.app import Browser

ROOT = Path(__file__).resolve().parents[1]
SIZE = (120, 32)


async def draw(paths: list[str], keys: list[str]) -> str:
    """Return the screen after these keys as SVG."""
    app = Browser(paths)
    async with app.run_test(size=SIZE) as pilot:
        for key in ["", *keys]:
            if key:
                await pilot.press(key)
            while not app.loaded or app.jobs.running():
                await asyncio.sleep(0.05)
            await pilot.pause()
        await pilot.pause(0.5)
        return app.export_screenshot(title="polyquant browse")


def main() -> None:
    """Quantize the demo model and draw."""
    target = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "docs/images/browse.svg"
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("hf-folder").symlink_to(demo_model("llama"))
        polyquant.quantize("hf-folder", "model-q4_k_m.gguf", recipe="q4_k_m")
        keys = ["C", "home", "plus", "down", "down", "enter"]
        drawn = asyncio.run(draw(["hf-folder", "model-q4_k_m.gguf"], keys))
    drawn = re.sub(r"terminal-\d+", "terminal", drawn)  # a hash of the content
    target.write_text(drawn + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
