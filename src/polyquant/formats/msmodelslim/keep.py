"""`--keep auto`: the plan asks which linear layers had better stay float, and takes them as if they had been named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import PlanError
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
    """The options with the proposed layers in place of "auto", and what the plan says of them. Raises PlanError, UnsupportedError.

    steps: as they would be without. A calibration text that nothing else looks at is left out then.
    """
    fresh = (Action.QUANTIZE, Action.REQUANTIZE)
    targets = {s.inputs: s.target for s in steps if isinstance(s.target, MsModelSlim) and s.action in fresh}
    limit = LIMIT if options.keep_error is None else options.keep_error
    found = propose_keep(source, targets, options, limit, on_tensor)
    if len(found.keep) == len(targets):
        raise PlanError(
            "every layer would have to stay float",
            expected=f"a divergence of at most {limit:g} nats",
            found=f"{found.before:.2g} with all of them as {next(iter(targets.values())).name}",
            hint="allow more with --keep-error, or choose another codec",
        )
    kept = tuple(k for k in options.keep if k != AUTO) + found.keep
    options = replace(options, keep=kept, keep_error=None)
    if options.wanting is None and not any(
        c.static for n, c in targets.items() if n.removesuffix(".weight") not in kept
    ):
        options = replace(options, calibration=None)
    return (
        options,
        f"--keep auto: {len(found.keep)} layers float, divergence {found.before:.2g} -> {found.after:.2g} nats",
    )
