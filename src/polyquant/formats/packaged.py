"""A format whose modules are imported on use, so that `--help` only needs the options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from polyquant.formats.protocol import Target
    from polyquant.types import Evidence, Finding

__all__ = ["PackagedFormat"]


class PackagedFormat:
    """Part of a Format (formats.protocol). package: its dotted name; target_place, sniff_place: "module:attribute" in
    it.

    target_options: the options of the target, repeated here so that the target need not be imported.
    """

    package: ClassVar[str]
    target_place: ClassVar[str]
    target_options: type
    sniff_place: ClassVar[str] = "open:sniff"

    def take(self, place: str) -> Any:
        """Import "module:attribute" from the package."""
        module, attribute = place.split(":")
        return getattr(import_module(f"{self.package}.{module}"), attribute)

    @property
    def target(self) -> Target:
        """The writing half of the format."""
        target: Target = self.take(self.target_place)()
        return target

    @property
    def findings(self) -> Mapping[str, str]:
        """CODES of the module `codes`."""
        codes: Mapping[str, str] = self.take("codes:CODES")
        return codes

    def sniff(self, path: Path) -> Evidence | None:
        """Evidence that the path holds this format."""
        evidence: Evidence | None = self.take(self.sniff_place)(path)
        return evidence

    def check(self, path: Path) -> Iterable[Finding]:
        """Run `check` of the module `check`."""
        findings: Iterable[Finding] = self.take("check:check")(path)
        return findings

    def check_headers(self, path: Path) -> Iterable[Finding]:
        """Run `check_headers` of the module `check`; if there is none, all of `check`."""
        if type(self).check is not PackagedFormat.check:
            return self.check(path)
        module = import_module(f"{self.package}.check")
        findings: Iterable[Finding] = getattr(module, "check_headers", module.check)(path)
        return findings
