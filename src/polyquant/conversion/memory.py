"""The working memory of a conversion: an estimate for each step, and the limit that `max_memory` sets.

The working memory consists of the row blocks and tensors in progress, and of the statistics of a calibration. The
program with its libraries, the headers and the plan come on top; they are measured, not estimated.
"""

from __future__ import annotations

import re
import resource
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from polyquant.calibration.sizes import TOKENS, WINDOWS
from polyquant.errors import PlanError
from polyquant.formats.steps import Step, by_blocks, cuts_parts, stacks_parts
from polyquant.types import Action, Affine, TensorSpec, Ternary, as_matrix

__all__ = ["calibration_bytes", "job_bytes", "peak_bytes", "program_bytes", "working_bytes", "working_limit"]

_TRELLIS_BYTES = 36
"""Bytes per weight of a trellis search or decoding."""
_HESSIAN_BYTES = 44
"""Bytes per element [K, K] of a Hessian: as collected, rotated, and its factor in float64."""
_STREAM_BYTES = 16
"""Bytes per weight of a row block: stored rows, floats, decoded result and its error."""
_SPARE = 24 << 20
"""Additional bytes for the allocator and the threads."""
_LAYER = re.compile(r"\D*\d+")
_DENSE = 8
"""Most matrices of one shape in a layer without experts."""


def job_bytes(step: Step, *, calibrated: bool) -> int:
    """Upper estimate for one job of a step: a row block if it streams, else the whole tensor."""
    rows, k = as_matrix(step.map.shape)
    if step.streams:
        return min(rows, step.block_rows) * k * _STREAM_BYTES
    if step.alone and step.action not in (Action.COPY, Action.TRANSCODE):
        return rows * k * _TRELLIS_BYTES + (k * k * _HESSIAN_BYTES if calibrated else 0)
    if cuts_parts(step) or stacks_parts(step):
        return min(rows, step.block_rows) * k * _STREAM_BYTES
    if by_blocks(step):
        whole = step.nbytes * (not step.target.row_sliced)
        whole += sum(_stored_bytes(s) for s in step.sources if not s.codec.row_sliced)
        return whole + min(rows, step.block_rows) * k * _STREAM_BYTES
    return rows * k * (3 if step.target.form is Ternary else 10)


def _stored_bytes(source: TensorSpec) -> int:
    return sum(spec.nbytes for spec in source.codec.specs(source.shape).values())


def calibration_bytes(steps: Sequence[Step]) -> int:
    """Upper estimate of a calibration's memory: hidden states of the text, and data for the experts of one layer."""
    calibrated = [s for s in steps if s.searches or s.target.form is Affine]
    widths = Counter(as_matrix(s.map.shape)[1] for s in calibrated)
    hidden = widths.most_common(1)[0][0] if widths else 0
    return 4 * WINDOWS * TOKENS * hidden + _expert_bytes(calibrated)


def working_bytes(steps: Sequence[Step], *, calibrated: bool, threads: int = 2) -> int:
    """Upper estimate of the working memory: `threads` of the largest jobs, and the largest that runs alone."""
    alone = max((job_bytes(s, calibrated=calibrated) for s in steps if s.alone), default=0)
    pool = max((job_bytes(s, calibrated=calibrated) for s in steps if not s.alone), default=0)
    return alone + threads * pool + (calibration_bytes(steps) if calibrated else 0)


def working_limit(steps: Sequence[Step], *, calibrated: bool, max_memory: int, window: int = 0) -> int:
    """Bytes that jobs may use at once, so that the process stays within `max_memory` bytes.

    window: of data that is fetched ahead. Raises PlanError if one job needs more.
    """
    base = program_bytes() + window + (calibration_bytes(steps) if calibrated else 0)
    largest = max(steps, key=lambda s: job_bytes(s, calibrated=calibrated), default=None)
    need = base + (job_bytes(largest, calibrated=calibrated) if largest is not None else 0)
    if need > max_memory:
        whole = largest is not None and not largest.streams
        raise PlanError(
            "the memory limit is too small" + (": this tensor cannot be converted in parts" if whole else ""),
            tensor=largest.map.target if whole and largest is not None else None,
            expected=f"at least {need:,} bytes",
            found=f"{max_memory:,}",
            hint=f"--max-memory {-(-need // 10**6)}MB" + (", or another codec for this tensor" if whole else ""),
        )
    return max_memory - base


def program_bytes() -> int:
    """Peak resident memory of this process so far, in bytes, plus a reserve for the allocator and the threads."""
    return _SPARE + peak_bytes()


def peak_bytes() -> int:
    """Peak resident memory of this process so far, in bytes."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return 1024 * int(status.split("VmHWM:", 1)[1].split(None, 1)[0])
    except (OSError, IndexError, ValueError):  # not Linux; there ru_maxrss includes the parent's memory before exec
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _expert_bytes(calibrated: Sequence[Step]) -> int:
    """Upper estimate of the calibration memory for the experts of one layer, in bytes.

    Hessians, or for gate and up, which are twice as many as down, the inputs of all tokens (calibration.hessians).
    """
    layers: dict[str, Counter[tuple[int, int]]] = {}
    for s in calibrated:
        if (place := _LAYER.match(s.map.target)) is not None:
            layers.setdefault(place[0], Counter())[as_matrix(s.map.shape)] += 1
    return max((sum(_matrix_bytes(shapes, *shape) for shape in shapes) for shapes in layers.values()), default=0)


def _matrix_bytes(shapes: Counter[tuple[int, int]], n: int, k: int) -> int:
    """Bytes for the matrices [n, k] of a layer if they belong to experts, else 0."""
    count, back = shapes[n, k], shapes[k, n]
    if count <= _DENSE:
        return 0
    return 4 * k * min(count * k, WINDOWS * TOKENS if count >= 2 * back > 0 and n != k else count * k)
