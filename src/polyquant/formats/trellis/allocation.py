"""`--target-bpw`: 2 to 8 bits for each weight of a Trellis folder, so that all of them together take that many bits a weight and do the least damage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
    from polyquant.formats.steps import Step

__all__ = ["with_allocation"]

OnTensor = Callable[[int, int, str], None]


def with_allocation(
    source: Checkpoint, steps: Sequence[Step], options: TrellisOptions, on_tensor: OnTensor | None
) -> tuple[list[Step], str]:
    """The steps with the bits of each weight that no rule names, and a name for the mix: how they were chosen. All components of every quantized weight count.

    Raises PlanError if the target is below 2 bits and what the scales take.
    """
    assert options.target_bpw is not None
    open_steps = [s for s in steps if s.searches and not s.why]
    if not open_steps:
        raise PlanError(
            "--target-bpw finds no weight whose bits are open",
            hint="rules name them all, or the source is no float model",
        )
    fixed = [s for s in steps if isinstance(s.target, Trellis) and s not in open_steps]
    budget = int(options.target_bpw * sum(s.weights for s in (*open_steps, *fixed)) / 8) - sum(s.nbytes for s in fixed)
    damage, what, how = _damage(source, open_steps, options, on_tensor)
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


def _size(found: Codec, shape: Shape) -> int:
    return sum(spec.nbytes for spec in found.specs(shape).values())


def _damage(
    source: Checkpoint, steps: Sequence[Step], options: TrellisOptions, on_tensor: OnTensor | None
) -> tuple[Mapping[str, float], str, str]:
    """Damage of each target tensor for a distortion of 1, what it is, and how it was found."""
    book = options.codebook or "mul1"
    if options.calibration is not None:
        wanted = {s.inputs: s.target for s in steps if isinstance(s.target, Trellis)}
        try:
            found = divergences(
                source.path, options.calibration, wanted, calibrated=options.calibrated, on_tensor=on_tensor
            )
        except UnsupportedError as refused:
            reason = f"{refused.message}, so allocated by the error of the weights"
        else:
            probe = distortion(PROBE_BITS, book)
            # What the decoder does not multiply with does no harm that was seen; the mean of the others is a guess on the safe side.
            mean = float(np.mean(list(found.values()))) if found else 1.0
            return (
                {s.map.target: found.get(s.inputs, mean) / probe for s in steps}, "KL",
                f"allocated by the KL divergence that each weight does alone with {PROBE_BITS} bits, measured on the calibration text",
            )  # fmt: skip
    else:
        reason = "allocated by the error of the weights (with --calibration the harm to the model is measured)"
    energy = {}
    for i, s in enumerate(steps):
        w = whole_floats([source[name] for name in s.map.sources], s.map.op)
        energy[s.map.target] = float(np.square(w, dtype=np.float64).sum())
        if on_tensor is not None:
            on_tensor(i + 1, len(steps), s.map.origin)
    return energy, "squared error", reason
