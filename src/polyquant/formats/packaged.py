"""A format whose code lies in the modules of one package, each imported when it is asked for: what a command line needs for `--help` is the options."""

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
    """Half of a Format (formats.protocol). package: its dotted name; target, sniff: where in it they are, "module:attribute".

    target_options: the options of the target, said again so that nobody imports what writes to know them.
    """

    package: ClassVar[str]
    target_place: ClassVar[str]
    target_options: type
    sniff_place: ClassVar[str] = "open:sniff"

    def take(self, place: str) -> Any:
        """What a module of the package calls so."""
        module, attribute = place.split(":")
        return getattr(import_module(f"{self.package}.{module}"), attribute)

    @property
    def target(self) -> Target:
        """How to write it."""
        made: Target = self.take(self.target_place)()
        return made

    @property
    def findings(self) -> Mapping[str, str]:
        """CODES of the module `codes`."""
        codes: Mapping[str, str] = self.take("codes:CODES")
        return codes

    def sniff(self, path: Path) -> Evidence | None:
        """Evidence that the path holds this format."""
        found: Evidence | None = self.take(self.sniff_place)(path)
        return found

    def check(self, path: Path) -> Iterable[Finding]:
        """`check` of the module of that name."""
        findings: Iterable[Finding] = self.take("check:check")(path)
        return findings
