"""Messages -> the text that a model was trained to answer, by the chat template of its checkpoint.

A template is rendered as transformers does, in a process of its own with limits (chat_child.py): the time that it takes to start, about
0.1 s, is the price for a template that cannot hang or fill the machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polyquant.errors import InputError, UnsupportedError, listed, printable
from polyquant.tokenizers.tokenizer import Tokenizer

__all__ = ["render", "render_chat", "template_of"]

_SECONDS = 0.75
"""Of processor time for a template; real ones take milliseconds."""
_WALL = 10.0
"""Seconds until the process is killed on a machine so busy that it does not get its share."""
_MEMORY = 512 << 20
_OUTPUT = 1 << 20
"""Characters."""
_CHILD = Path(__file__).with_name("chat_child.py")
_KEPT = ("LD_LIBRARY_PATH", "TZ")
"""Environment that the process needs to start and to tell the time; it gets nothing else."""
_PLAIN = "give a plain prompt instead of messages"
_WHY = {
    "memory": "the chat template needs too much memory",
    "output": "the chat template writes too much",
    "reach": "the chat template reaches for what it may not see",
    "syntax": "the chat template is not valid Jinja",
    "refused": "the chat template refuses these messages",
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
    """The prompt that stands for messages; to be encoded without BOS and EOS, which the template writes. Raises InputError, UnsupportedError."""
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
    """The template of that name; without a name, `tool_use` where there are tools and such a template, else the default one.
    Raises UnsupportedError."""
    known = tokenizer.templates
    if not known:
        raise UnsupportedError("there is no chat template: this is a base model", file=tokenizer.file, hint=_PLAIN)
    wanted = name or ("tool_use" if tools and "tool_use" in known else "default")
    if wanted not in known:
        raise UnsupportedError(
            f"no chat template is called '{printable(wanted)}'",
            file=tokenizer.file,
            hint=f"known: {listed(sorted(known), 8)}",
        )
    return known[wanted]


def render(template: str, variables: Mapping[str, Any], *, file: object = None) -> str:
    """What a Jinja template says of variables (JSON values). Raises InputError where it breaks a limit or fails, UnsupportedError without
    jinja2."""
    job = {
        "path": _where_jinja_is(),
        "seconds": _SECONDS,
        "memory": _MEMORY,
        "output": _OUTPUT,
        "template": template,
        "variables": dict(variables),
    }
    command = [sys.executable, "-I", "-S", str(_CHILD)]
    environment = {k: os.environ[k] for k in _KEPT if k in os.environ}
    try:
        done = subprocess.run(  # noqa: S603 - our own program under our own interpreter
            command, input=json.dumps(job).encode(), capture_output=True, timeout=_WALL, env=environment, check=False
        )
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


def _broken(told: bytes) -> dict[str, str]:
    """The last line of a process that could not say itself what happened."""
    last = told.decode(errors="replace").strip().rpartition("\n")[2]
    return {"error": "memory", "detail": ""} if "MemoryError" in last else {"error": "fails", "detail": last}


def _where_jinja_is() -> list[str]:
    """Folders that hold jinja2 and what it needs, found without importing them."""
    found = []
    for package in ("jinja2", "markupsafe"):
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise UnsupportedError("chat templates need the package 'jinja2'", hint="pip install 'polyquant[run]'")
        found.append(str(Path(spec.origin).parent.parent))
    return list(dict.fromkeys(found))


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Roles are texts; contents are texts, or lists of parts that are texts, as OpenAI's clients write them."""
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
            raise InputError(f"the content of message {i} is no text", found=type(content).__name__)
        out.append({**message, "content": content})
    if not out:
        raise InputError("there are no messages", expected="at least one")
    return out


def _part(part: Any, index: int) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise UnsupportedError(f"message {index} holds a part that is no text", found=kind)
