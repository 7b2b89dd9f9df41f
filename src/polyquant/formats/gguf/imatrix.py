"""Measure an importance matrix of a float model, and write it as llama.cpp's imatrix tool does.

    general.type                    "imatrix"
    imatrix.datasets                name of the text file
    imatrix.chunk_count, .chunk_size    windows of 512 tokens
    NAME.in_sum2, NAME.counts       see calibration.importance

Source of the format: llama.cpp, tools/imatrix.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polyquant.architectures.language_model import language_model
from polyquant.calibration.importance import Summed, unreached
from polyquant.calibration.sizes import TOKENS, WINDOWS
from polyquant.calibration.squares import measure
from polyquant.errors import printable
from polyquant.formats.existing import refuse_target, replaceable
from polyquant.formats.gguf.layout import lay_out
from polyquant.formats.progress import shows_progress
from polyquant.formats.steps import Progress
from polyquant.gguf_values import string, strings, u32
from polyquant.opening import open_checkpoint
from polyquant.registry import codec
from polyquant.storage.locations import located
from polyquant.storage.staging import staged
from polyquant.tables import size
from polyquant.types import F32, Shape, TensorSpec

__all__ = ["Importance", "importance"]


@dataclass(frozen=True, slots=True, repr=False)
class Importance:
    """A written importance file.

    tensors: number of tensors with importance; tokens: the largest token count of a tensor; unreached: stack -> experts
    that no token reached.
    """

    path: Path
    nbytes: int
    tensors: int
    tokens: int
    unreached: Mapping[str, tuple[int, ...]]

    def __repr__(self) -> str:
        return (
            f"<Importance {printable(self.path)}: {self.tensors} tensors, {self.tokens:,} tokens, {size(self.nbytes)}>"
        )


@shows_progress("importance")
def importance(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    calibration: str | os.PathLike[str],
    windows: int = WINDOWS,
    overwrite: bool = False,
    progress: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Importance:
    """Measure the importance matrix of the model `src` on a calibration text, and write it to `dst`.

    calibration: a UTF-8 file, samples, or "self" for generated text; at most `windows` windows of 512 tokens.
    progress: draw a bar. Raises InputError, UnsupportedError, PlanError, OSError.
    """
    target = Path(dst)
    refuse_target(target, located(src), overwrite=overwrite)
    summed_by_name = measure(
        language_model(open_checkpoint(src)), calibration, windows=windows, tick=_ticking(on_progress)
    )
    tokens = int(max(s.counts.max() for s in summed_by_name.values()))
    written = _write(summed_by_name, target, Path(calibration).name, tokens, overwrite=overwrite)
    unreached_experts = {
        name: tuple(e) for name, summed in summed_by_name.items() if (e := unreached(summed.importance))
    }
    return Importance(target, written, len(summed_by_name), tokens, unreached_experts)


def _ticking(on_progress: Callable[[Progress], None] | None) -> Callable[[float], None]:
    """Report a share from 0 to 1 as thousandths."""
    if on_progress is None:
        return lambda share: None
    return lambda share: on_progress(Progress(int(1000 * share), 1000, "", 0.0))


def _write(summed_by_name: Mapping[str, Summed], target: Path, text: str, tokens: int, *, overwrite: bool) -> int:
    """Write the file; returns its size."""
    plain = codec("f32")
    arrays: dict[str, F32] = {}
    for name, summed in sorted(summed_by_name.items()):
        arrays |= {f"{name}.in_sum2": summed.total, f"{name}.counts": summed.counts[:, None]}
    specs = [TensorSpec(name, _shape(array), plain) for name, array in arrays.items()]
    metadata = {
        "general.type": string("imatrix"),
        "imatrix.datasets": strings([text]),
        "imatrix.chunk_count": u32(-(-tokens // TOKENS)),
        "imatrix.chunk_size": u32(TOKENS),
    }
    layout = lay_out(specs, metadata, name=target.name)
    job = hashlib.sha256(b"".join(array.tobytes() for array in arrays.values())).hexdigest()
    with staged(target, layout, job, resume="never", replaceable=replaceable if overwrite else None) as staging:
        for name, array in arrays.items():
            staging.write(name, "blocks", 0, np.ascontiguousarray(array))
            staging.finish(name, None)
    return layout.nbytes


def _shape(array: F32) -> Shape:
    return array.shape[0], array.shape[1]
