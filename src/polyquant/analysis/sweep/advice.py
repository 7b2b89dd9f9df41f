"""Choose among the trials of a sweep: the efficient ones, and the smallest and fastest within limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polyquant.analysis.efficient import efficient_names
from polyquant.analysis.sweep.trials import Trial
from polyquant.errors import PlanError
from polyquant.tables import size

__all__ = ["MAX_KL", "Advice", "Limits", "choose", "efficient", "per_second", "worth_keeping"]

MAX_KL = 0.05
"""Default limit of the mean KL divergence, in nats per token."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a recommendation: divergence in nats per token, bytes of the tensors, decoded tokens per second."""

    max_kl: float = MAX_KL
    max_size: int | None = None
    min_speed: float | None = None

    def __post_init__(self) -> None:
        if not self.max_kl > 0:
            raise PlanError("--max-kl must be positive", found=self.max_kl)

    def refusal(self, trial: Trial) -> str | None:
        """The limit that a measured trial exceeds; None if there is none."""
        if trial.kl is None or trial.speed is None or not trial.kl <= self.max_kl:
            return "divergence"
        if self.max_size is not None and (trial.nbytes or 0) > self.max_size:
            return "size"
        if self.min_speed is not None and trial.speed.decode < self.min_speed:
            return "speed"
        return None

    def __str__(self) -> str:
        parts = [f"KL divergence at most {self.max_kl:g} nats per token"]
        parts += [f"at most {size(self.max_size)}"] if self.max_size is not None else []
        parts += [f"at least {self.min_speed:g} tokens/s"] if self.min_speed is not None else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Advice:
    """The choice, and one sentence about it. smallest, fastest: None if no candidate is within the limits."""

    smallest: Trial | None
    fastest: Trial | None
    sentence: str


def per_second(rate: float) -> str:
    """A rate with three digits or more: "4.41", "2014"."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _measured(trials: Sequence[Trial]) -> list[Trial]:
    return [t for t in trials if t.status == "measured"]


def efficient(trials: Sequence[Trial]) -> frozenset[str]:
    """Names of the measured trials that no other one beats in both size and divergence."""
    return efficient_names({t.name: (t.nbytes or 0, t.kl or 0.0) for t in _measured(trials)})


def choose(trials: Sequence[Trial], limits: Limits) -> Advice:
    """Choose the smallest and the fastest trial within the limits."""
    measured = _measured(trials)
    if not measured:
        return Advice(None, None, "no candidate was measured")
    allowed = [t for t in measured if limits.refusal(t) is None]
    if not allowed:
        exceeded = [limits.refusal(t) for t in measured]
        words = ", ".join(f"{exceeded.count(w)} by {w}" for w in ("divergence", "size", "speed") if w in exceeded)
        closest = min(measured, key=lambda t: t.kl or 0.0)
        return Advice(
            None, None,
            f"no candidate is within the limits ({limits}): excluded {words}; closest to the source is {closest.name} "
            f"with {closest.kl:.3g} nats",
        )  # fmt: skip
    smallest = min(allowed, key=lambda t: (t.nbytes or 0, t.kl or 0.0))
    fastest = max(allowed, key=lambda t: t.speed.decode if t.speed is not None else 0.0)
    rank = f"the smallest of the {len(allowed)} candidates" if len(allowed) > 1 else "the only candidate"
    sentence = f"{smallest.name} is {rank} within the limits ({limits})"
    if len(allowed) == 1:
        return Advice(smallest, fastest, sentence)
    if fastest.name == smallest.name:
        return Advice(smallest, fastest, f"{sentence}, and the fastest")
    rate = fastest.speed.decode if fastest.speed is not None else 0.0
    return Advice(smallest, fastest, f"{sentence}; {fastest.name} is the fastest with {per_second(rate)} tokens/s")


def worth_keeping(trials: Sequence[Trial], limits: Limits) -> frozenset[str]:
    """Names of the efficient trials and of those chosen within the limits."""
    chosen = choose(trials, limits)
    return efficient(trials) | {t.name for t in (chosen.smallest, chosen.fastest) if t is not None}
