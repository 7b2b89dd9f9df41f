"""Render messages into a prompt with the chat template of a checkpoint.

Templates are rendered as in transformers, but in a separate process with limits (chat_child.py). Its startup of about
0.1 s is the price for templates that cannot hang or exhaust the machine.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyquant.errors import InputError, UnsupportedError, listed, printable
from polyquant.runtime.limited import folders_of, run_limited
from polyquant.tokenizers.tokenizer import Tokenizer

__all__ = ["render", "render_chat", "template_of"]

_SECONDS = 0.75
"""Processor time for a template; real ones take milliseconds."""
_MEMORY = 512 << 20
_OUTPUT = 1 << 20
"""In characters."""
_CHILD = Path(__file__).with_name("chat_child.py")
_PLAIN = "use a plain prompt instead of messages"
_WHY = {
    "memory": "the chat template needs too much memory",
    "output": "the chat template writes too much",
    "reach": "the chat template accesses a forbidden attribute",
    "syntax": "the chat template is not valid Jinja",
    "refused": "the chat template rejects these messages",
    "fails": "the chat template fails on these messages",
}


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    name: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Return the prompt for messages, to be encoded without BOS and EOS, which the template adds.

    Raises InputError, UnsupportedError.
    """
    variables: dict[str, Any] = {
        f"{k}_token": text for k in tokenizer.special if (text := tokenizer.text_of(k)) is not None
    }
    variables |= {
        "messages": _checked(messages),
        "tools": list(tools) if tools else None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    return render(template_of(tokenizer, name, tools=bool(tools)), variables, file=tokenizer.file)


def template_of(tokenizer: Tokenizer, name: str | None = None, *, tools: bool = False) -> str:
    """Return the template `name`; without a name, `tool_use` if there are tools and such a template, else the default.

    Raises UnsupportedError.
    """
    known = tokenizer.templates
    if not known:
        raise UnsupportedError("the model has no chat template: it is a base model", file=tokenizer.file, hint=_PLAIN)
    selected = name or ("tool_use" if tools and "tool_use" in known else "default")
    if selected not in known:
        raise UnsupportedError(
            f"no chat template is called '{printable(selected)}'",
            file=tokenizer.file,
            hint=f"known: {listed(sorted(known), 8)}",
        )
    return known[selected]


def render(template: str, variables: Mapping[str, Any], *, file: object = None) -> str:
    """Render a Jinja template with variables (JSON values).

    Raises InputError if it exceeds a limit or fails, UnsupportedError without jinja2.
    """
    folders = folders_of(("jinja2", "markupsafe"))
    if folders is None:
        raise UnsupportedError("chat templates need the package 'jinja2'", hint="pip install 'polyquant[run]'")
    import subprocess  # 10 ms, which models without a template do not need

    job = {
        "path": folders,
        "seconds": _SECONDS,
        "memory": _MEMORY,
        "output": _OUTPUT,
        "template": template,
        "variables": dict(variables),
    }
    try:
        done = run_limited(_CHILD, job)
    except subprocess.TimeoutExpired:
        raise InputError("the chat template runs too long", file=file, hint=_PLAIN) from None
    if done.returncode < 0:
        how = (
            "runs too long" if -done.returncode == signal.SIGPROF else f"ends its process by signal {-done.returncode}"
        )
        raise InputError(f"the chat template {how}", file=file, hint=_PLAIN)
    answer = json.loads(done.stdout) if done.returncode == 0 else _broken(done.stderr)
    if "text" not in answer:
        what = _WHY[answer["error"]]
        raise InputError(f"{what}: {printable(answer['detail'])}" if answer["detail"] else what, file=file)
    text: str = answer["text"]
    return text


def _broken(stderr: bytes) -> dict[str, str]:
    """Return the error of a process that failed without reporting one, from its last line."""
    last = stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return {"error": "memory", "detail": ""} if "MemoryError" in last else {"error": "fails", "detail": last}


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages; contents are strings, or lists of text parts as written by OpenAI's clients."""
    out = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(
                f"message {i} must have a role and a content",
                expected='{"role": "user", "content": "Hello"}',
                found=message,
            )
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            content = "".join(_part(part, i) for part in content)
        elif content is not None and not isinstance(content, str):
            raise InputError(f"the content of message {i} is not a string", found=type(content).__name__)
        out.append({**message, "content": content})
    if not out:
        raise InputError("there are no messages", expected="at least one")
    return out


def _part(part: Any, index: int) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise UnsupportedError(f"message {index} contains a non-text part", found=kind)
