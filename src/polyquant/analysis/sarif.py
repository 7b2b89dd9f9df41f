"""Findings as SARIF 2.1.0, the format in which repositories and code hosts show results of analysis tools.

One run, one result per finding: the rule is the finding's code with its explanation, the level its severity, the
physical location the file, the logical location the tensor. File URIs are relative to the current folder if the model
is inside it, else to the folder of the model, so that no path of the machine is published.

Source: OASIS, Static Analysis Results Interchange Format Version 2.1.0.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from polyquant.analysis.explain import explain
from polyquant.errors import PolyquantError, printable
from polyquant.findings import Finding

__all__ = ["failed", "report"]

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json"


def report(findings: Iterable[Finding], path: str | os.PathLike[str]) -> dict[str, Any]:
    """The SARIF log of a validation of `path`."""
    listed = list(findings)
    codes = list(dict.fromkeys(f.code for f in listed))
    results = [_result(f, codes.index(f.code), Path(path)) for f in listed]
    return _log([_rule(code) for code in codes], results, {"executionSuccessful": True})


def failed(problem: PolyquantError) -> dict[str, Any]:
    """The SARIF log of a validation that could not run. The message has no path."""
    notification = {"level": "error", "message": {"text": printable(problem.message, 600)}}
    return _log([], [], {"executionSuccessful": False, "toolExecutionNotifications": [notification]})


def _log(rules: list[dict[str, Any]], results: list[dict[str, Any]], invocation: dict[str, Any]) -> dict[str, Any]:
    from polyquant import __version__

    driver = {"name": "polyquant", "version": __version__, "semanticVersion": __version__, "rules": rules}
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(code: str) -> dict[str, Any]:
    text = explain(code)
    summary = text.split(". ", 1)[0].removesuffix(".") + "."
    return {
        "id": code,
        "shortDescription": {"text": summary},
        "fullDescription": {"text": text},
        "help": {"text": f"{text}\n\npolyquant explain {code}"},
    }


def _result(finding: Finding, index: int, path: Path) -> dict[str, Any]:
    uri = _uri(path, finding.file)
    location: dict[str, Any] = {
        # Code hosts require a region; weight files have no lines.
        "physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": 1}},
    }
    message = printable(finding.message, 600)
    if finding.tensor is not None:
        name = printable(finding.tensor)
        location["logicalLocations"] = [{"name": name, "fullyQualifiedName": name, "kind": "member"}]
        message = f"{name}: {message}"
    identity = "\0".join((finding.code, uri, finding.tensor or ""))
    return {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": finding.severity.value,
        "message": {"text": message},
        "locations": [location],
        "partialFingerprints": {"polyquant/v1": hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()},
    }


def _uri(path: Path, file: str | None) -> str:
    """A relative URI of the file of a finding: the model, or one of the files of its folder."""
    whole, base = Path(os.path.abspath(path)), Path.cwd()  # noqa: PTH100 - keeps links
    home = whole if whole.is_dir() else whole.parent
    place = whole if file is None or file == whole.name else Path(os.path.normpath(home / file))
    if not place.is_relative_to(home):  # a name that leaves the folder
        place = whole
    root = base if place.is_relative_to(base) and place != base else whole.parent
    return quote(os.fsencode(place.relative_to(root).as_posix() or "."))
