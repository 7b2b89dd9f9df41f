"""`--keep auto`: find linear layers that should stay float, as if they had been named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import PlanError
from polyquant.formats.msmodelslim.choices import module_of
from polyquant.formats.msmodelslim.options import AUTO, MsModelSlimOptions
from polyquant.formats.msmodelslim.sensitivity import LIMIT, propose_keep
from polyquant.formats.steps import Step
from polyquant.types import Action, Checkpoint

__all__ = ["with_proposal"]


def with_proposal(
    source: Checkpoint,
    steps: Sequence[Step],
    options: MsModelSlimOptions,
    on_tensor: Callable[[int, int, str], None] | None,
) -> tuple[MsModelSlimOptions, str]:
    """The options with the proposed layers instead of "auto", and a summary for the plan. Raises PlanError,
    UnsupportedError.

    steps: without the proposal. The calibration text is dropped if no other option needs it.
    """
    fresh = (Action.QUANTIZE, Action.REQUANTIZE)
    taken = [(s, s.target) for s in steps if isinstance(s.target, MsModelSlim) and s.action in fresh]
    targets = {s.inputs: target for s, target in taken}
    folder_names: dict[str, list[str]] = {}  # name in the model -> names in the folder
    for s, _ in taken:
        folder_names.setdefault(module_of(s.inputs), []).append(module_of(s.map.target))
    limit = LIMIT if options.keep_error is None else options.keep_error
    proposal = propose_keep(source, targets, options, limit, on_tensor)
    if len(proposal.keep) == len(targets):
        raise PlanError(
            "every layer would have to stay float",
            expected=f"a divergence of at most {limit:g} nats",
            found=f"{proposal.before:.2g} with all of them as {next(iter(targets.values())).name}",
            hint="allow more with --keep-error, or choose another codec",
        )
    kept = tuple(k for k in options.keep if k != AUTO) + tuple(name for k in proposal.keep for name in folder_names[k])
    options = replace(options, keep=kept, keep_error=None)
    if options.calibrated_option is None and not any(
        c.static for n, c in targets.items() if module_of(n) not in proposal.keep
    ):
        options = replace(options, calibration=None)
    return (
        options,
        f"--keep auto: {len(proposal.keep)} layers float, divergence {proposal.before:.2g} -> {proposal.after:.2g} "
        "nats",
    )
