"""`--target-bpw`: choose 2 to 8 bits for each weight of a Trellis folder, for a mean size with the least damage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from polyquant.calibration.sensitivity import PROBE_BITS, divergences
from polyquant.codecs.trellis import Trellis
from polyquant.errors import PlanError, UnsupportedError
from polyquant.formats.trellis.options import TrellisOptions
from polyquant.quantizers.allocate import Choice, allocate, distortion
from polyquant.registry import codec
from polyquant.rows import whole_floats
from polyquant.types import Checkpoint, Codec, Shape

if TYPE_CHECKING:
    from polyquant.formats.protocol import Planning
from polyquant.formats.steps import Step

__all__ = ["with_allocation"]

OnTensor = Callable[[int, int, str], None]


def with_allocation(planning: Planning, steps: Sequence[Step]) -> tuple[list[Step], str]:
    """The steps with allocated bits for each weight without a rule, and a name for the allocation.

    All components of every quantized weight count. Raises PlanError if the target is below 2 bits plus scales.
    """
    options = planning.options
    assert options.target_bpw is not None
    open_steps = [s for s in steps if s.searches and not s.why]
    if not open_steps:
        raise PlanError(
            "--target-bpw found no weight to allocate bits to",
            hint="rules cover all weights, or the source is not a float model",
        )
    fixed = [s for s in steps if isinstance(s.target, Trellis) and s not in open_steps]
    budget = int(options.target_bpw * sum(s.weights for s in (*open_steps, *fixed)) / 8) - sum(s.nbytes for s in fixed)
    measured = partial(_damage, planning.source, open_steps, options, planning.on_tensor)
    damage, what, how = planning.measure("damage", measured)
    books = {bits: codec(options.codec_name(bits)) for bits in range(2, 9)}
    choices = [
        Choice(
            s.map.target,
            {b: _size(c, s.map.shape) for b, c in books.items()},
            {b: damage[s.map.target] * distortion(b, options.codebook or "mul1") for b in books},
        )
        for s in open_steps
    ]
    try:
        bits = allocate(choices, budget)
    except PlanError as problem:
        least = 8 * sum(min(c.nbytes.values()) for c in choices) / sum(s.weights for s in open_steps)
        raise PlanError(
            "--target-bpw is too small for these weights",
            expected=f"at least {least + 0.001:.3f} (2 bits, and scales)",
            found=options.target_bpw,
        ) from problem
    out = []
    for s in steps:
        if s.map.target in bits:
            chosen = books[bits[s.map.target]]
            why = f"{what} {damage[s.map.target] * distortion(bits[s.map.target], options.codebook or 'mul1'):.3g}"
            out.append(replace(s, target=chosen, nbytes=_size(chosen, s.map.shape), why=why))
        else:
            out.append(s)
    return out, f"{options.target_bpw} bits per weight, {how}"


def _size(codec: Codec, shape: Shape) -> int:
    return sum(spec.nbytes for spec in codec.specs(shape).values())


def _damage(
    source: Checkpoint, steps: Sequence[Step], options: TrellisOptions, on_tensor: OnTensor | None
) -> tuple[Mapping[str, float], str, str]:
    """The damage of each target tensor at distortion 1, the name of the measure, and how it was measured."""
    book = options.codebook or "mul1"
    if options.calibration is not None:
        wanted = {s.inputs: s.target for s in steps if isinstance(s.target, Trellis)}
        try:
            measured = divergences(
                source.path, options.calibration, wanted, calibrated=options.calibrated, on_tensor=on_tensor
            )
        except UnsupportedError as refused:
            reason = f"{refused.message}, so allocated by the error of the weights"
        else:
            probe = distortion(PROBE_BITS, book)
            # Weights that the decoder does not use have no measured damage; the mean of the others is a safe guess.
            mean = float(np.mean(list(measured.values()))) if measured else 1.0
            return (
                {s.map.target: measured.get(s.inputs, mean) / probe for s in steps},
                "KL",
                f"allocated by the KL divergence from quantizing each weight alone to {PROBE_BITS} bits, on the "
                "calibration text",
            )
    else:
        reason = "allocated by the error of the weights (--calibration would measure the damage to the model)"
    energy = {}
    for i, s in enumerate(steps):
        w = whole_floats([source[name] for name in s.map.sources], s.map.op)
        energy[s.map.target] = float(np.square(w, dtype=np.float64).sum())
        if on_tensor is not None:
            on_tensor(i + 1, len(steps), s.map.origin)
    return energy, "squared error", reason
