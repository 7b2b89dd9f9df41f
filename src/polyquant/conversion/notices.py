"""Warnings of a plan about substituted codecs, rules without effect, and stacks of experts: a stack has one codec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from polyquant.errors import listed, printable
from polyquant.formats.steps import Step
from polyquant.recipes.recipe import Facts, Rule
from polyquant.types import Action

__all__ = ["mixed_stacks", "rule_notices", "substitutes"]


def mixed_stacks(steps: Sequence[Step]) -> Iterator[str]:
    """Yield a warning if quantized experts of several codecs become one stack."""
    mixed = [(s, codecs) for s in _stacks(steps) if s.action is not Action.QUANTIZE and len(codecs := _codecs(s)) > 1]
    if mixed:
        step, codecs = mixed[0]
        yield (
            f"{len(mixed)} stacks join experts of several codecs, and a stack has one "
            f"(first: {printable(step.map.target)}: {listed(codecs)} become {step.target.name})"
        )


def substitutes(steps: Sequence[Step]) -> Iterator[str]:
    """Yield a warning if rows are not a multiple of the requested codec's block."""
    replaced = [s for s in steps if s.instead_of]
    if replaced:
        step, others = replaced[0], len(replaced) - 1
        more = f", and {others} more {'tensor' if others == 1 else 'tensors'}" if others else ""
        yield (
            f"{printable(step.map.target)} becomes {step.target.name}{more}: rows of {step.map.shape[-1]} values do "
            f"not divide into blocks of {step.instead_of}"
        )


def rule_notices(rules: Sequence[Rule], facts: Facts, steps: Sequence[Step]) -> Iterator[str]:
    """Yield a warning for each rule that matches no tensor, vectors only, or some experts of a stack."""
    for rule in rules:
        flag = f"--rule {printable(f'{rule.match}={rule.codec}')}"
        hit = [s for s in steps if rule.named((s.map.target, *s.map.sources), facts)]
        if not hit:
            wider = replace(rule, match=f"*{rule.match.strip('*')}*")
            named = [s.map.target for s in steps if wider.named((s.map.target, *s.map.sources), facts)]
            if named:  # a part of a name, as llama-quantize's --tensor-type takes it
                yield f"{flag} matches no tensor; {printable(f'{wider.match}={rule.codec}')} matches {len(named)}"
                continue
            name = next((s.map.target for s in steps if not s.map.is_vector), "")
            yield f"{flag} matches no tensor; tensor names look like {printable(name)}"
            continue
        if all(s.map.is_vector and s.target.name != rule.codec for s in hit):
            yield f"{flag} matches vectors only, which stay {hit[0].target.name}"
        partly = [
            (s, len(named))
            for s in _stacks(steps)
            if 0 < len(named := rule.named(s.map.sources, facts)) < len(s.map.sources)
            and not rule.named((s.map.target,), facts)
        ]
        if partly:
            step, count = partly[0]
            more = f"; same for {len(partly) - 1} more stacks" if len(partly) > 1 else ""
            yield (
                f"{flag} matches {count} of the {len(step.map.sources)} experts of {printable(step.map.target)}, and "
                "a stack has one codec: "
                f"all get {step.target.name}{more}"
            )


def _stacks(steps: Sequence[Step]) -> Iterator[Step]:
    return (s for s in steps if len(s.sources) > 1 and len(s.map.shape) > 2)


def _codecs(step: Step) -> list[str]:
    return sorted({s.codec.name for s in step.sources})
