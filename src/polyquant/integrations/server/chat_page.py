"""The chat page of `/`: one document from the files of page/, with a policy that allows only its own script and style.

The page contains no data: it asks for the API key, if there is one, and talks to /v1.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from starlette.responses import HTMLResponse

__all__ = ["SCRIPTS", "chat_page"]

SCRIPTS = ("api.js", "markdown.js", "compare.js", "view.js", "chat.js")
"""In the order in which they need each other."""


def chat_page() -> HTMLResponse:
    """Return the response to `GET /`, to be sent any number of times."""
    folder = files(__package__) / "page"
    style = (folder / "chat.css").read_text(encoding="utf-8")
    scripts = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{scripts}}})();\n'
    page = (folder / "index.html").read_text(encoding="utf-8")
    page = page.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_digest(script)}",
            f"style-src {_digest(style)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(page, headers=headers)


def _digest(text: str) -> str:
    """Return the source expression of an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
