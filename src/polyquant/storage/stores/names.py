"""Names of models in Ollama's store, as ollama/types/model/name.go parses them: [HOST/][NAMESPACE/]MODEL[:TAG].

The parts are the folders of a manifest, so each is checked before it is used in a path: letters, digits and "_" first,
then also "-", "." (not in a namespace) and ":" (only in a host). The file has limits of 350 and 80 characters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from polyquant.errors import PlanError, printable

__all__ = ["LATEST", "LIBRARY", "ModelName", "parse_name", "tag_checked"]

LATEST = "latest"
LIBRARY = "library"
"""The namespace of a name without one."""
_PARTS = {
    "host": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}", re.ASCII),
    "namespace": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}", re.ASCII),
    "model": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}", re.ASCII),
    "tag": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}", re.ASCII),
}


@dataclass(frozen=True, slots=True)
class ModelName:
    """A model's name. host: "" if the name does not have one; then the store tells."""

    model: str
    tag: str = LATEST
    namespace: str = LIBRARY
    host: str = ""

    def __str__(self) -> str:
        before = f"{self.host}/" if self.host else ""
        before += f"{self.namespace}/" if before or self.namespace != LIBRARY else ""
        return f"{before}{self.model}:{self.tag}"

    def at(self, host: str) -> ModelName:
        """Return the name with this host. Raises PlanError."""
        return replace(self, host=_checked("host", host, host))

    def path(self, manifests: Path) -> Path:
        """Return the path of the manifest. The host must be known."""
        assert self.host, "the host of the name must be known"
        return manifests / self.host / self.namespace / self.model / self.tag


def parse_name(text: str) -> ModelName:
    """Parse [HOST/][NAMESPACE/]MODEL[:TAG]. Raises PlanError."""
    rest, tag = text, LATEST
    if text.rfind(":") > text.rfind("/"):
        rest, _, tag = text.rpartition(":")
    *before, model = rest.split("/")
    if len(before) > 2:
        before = ["/".join(before[:-1]), before[-1]]  # a host has no slash: the check below names it
    namespace = before[-1] if before else LIBRARY
    host = before[0] if len(before) == 2 else None
    return ModelName(
        _checked("model", model, text),
        _checked("tag", tag, text),
        _checked("namespace", namespace, text),
        "" if host is None else _checked("host", host, text),
    )


def tag_checked(text: str) -> str:
    """Return a valid tag. Raises PlanError."""
    return _checked("tag", text, text)


def _checked(what: str, part: str, name: str) -> str:
    if _PARTS[what].fullmatch(part) is None:
        raise PlanError(
            f"the {what} of the name '{printable(name, 120)}' is not valid", found=repr(printable(part, 80)),
            hint="a name is [HOST/][NAMESPACE/]MODEL[:TAG] of letters, digits, '_', '-' and '.'",
        )  # fmt: skip
    return part
