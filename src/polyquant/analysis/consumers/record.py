"""A program that reads models: its version, its rules, and their findings.

A consumer is one module with a `CONSUMER`. Its rules were read in the program's source, which each explanation names;
they depend on headers and small files only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from polyquant.analysis.consumers.model import Model
from polyquant.types import Finding, Severity

__all__ = ["Consumer", "Effect", "Program", "Rule", "rules_of", "words"]


class Effect(Enum):
    """rejects: the program does not load the model; miscomputes: it loads, and weights are wrong; needs: it loads under
    a condition (a package, a machine).
    """

    REJECTS = "rejects"
    MISCOMPUTES = "miscomputes"
    NEEDS = "needs"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a program, with the code and the explanation of its findings."""

    code: str
    effect: Effect
    explanation: str

    def finding(self, message: str, tensor: str | None = None, file: str | None = None) -> Finding:
        """A finding of this rule: an error, or a note for a condition."""
        severity = Severity.NOTE if self.effect is Effect.NEEDS else Severity.ERROR
        return Finding(self.code, severity, message, tensor, file)


@dataclass(frozen=True, slots=True)
class Program:
    """The source in which rules were read. repository: on GitHub; commit: "" if the version identifies it."""

    title: str
    version: str
    repository: str
    commit: str = ""

    def __str__(self) -> str:
        return f"{self.title} {self.version}" + (f" (commit {self.commit})" if self.commit else "")

    def rejects(self, number: int, text: str, source: str) -> Rule:
        """A rule about models that the program rejects. source: file and function."""
        return self._rule(Effect.REJECTS, number, text, source)

    def miscomputes(self, number: int, text: str, source: str) -> Rule:
        """A rule about models that load with wrong weights."""
        return self._rule(Effect.MISCOMPUTES, number, text, source)

    def needs(self, number: int, text: str, source: str) -> Rule:
        """A rule about models that load under a condition."""
        return self._rule(Effect.NEEDS, number, text, source)

    def _rule(self, effect: Effect, number: int, text: str, source: str) -> Rule:
        return Rule(f"HUB{number:03}", effect, f"{text} Source: {self}, {source}.")


@dataclass(frozen=True, slots=True)
class Consumer:
    """A program that reads models.

    reads: form -> the conditions under which it is accepted. check: (model, number of devices that share each layer) ->
    findings. parallel: whether the number of devices matters.
    """

    name: str
    program: Program
    reads: tuple[tuple[str, str], ...]
    rules: tuple[Rule, ...]
    check: Callable[[Model, int], Iterator[Finding]]
    parallel: bool = False

    def effect(self, code: str) -> Effect | None:
        """The effect of the rule with this code; None for a code of something else."""
        return next((rule.effect for rule in self.rules if rule.code == code), None)


def rules_of(values: Iterable[object]) -> tuple[Rule, ...]:
    """The rules among the values of a module, by code."""
    return tuple(sorted((v for v in values if isinstance(v, Rule)), key=lambda rule: rule.code))


def words(text: str) -> frozenset[str]:
    """The words, separated by spaces."""
    return frozenset(text.split())
