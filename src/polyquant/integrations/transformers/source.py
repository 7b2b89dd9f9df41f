"""A checkpoint of any format as transformers reads it: configuration files, and the maps that make its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from polyquant.architectures.find import of_config, of_metadata
from polyquant.architectures.translate import to_hf, usual_tensors
from polyquant.capabilities import HoldsBlocks, MaybeIntegers, Opaque, claims
from polyquant.errors import InputError, UnsupportedError
from polyquant.integrations.transformers.smoothed import usual_names
from polyquant.operations import Same, Transpose, chain, steps_of
from polyquant.rows import row_span
from polyquant.runtime.derived import materialize
from polyquant.runtime.identity import rounds_tokens
from polyquant.runtime.load import Activations
from polyquant.types import F32, Checkpoint, Floats, Rounding, TensorMap, Weight, as_matrix

__all__ = ["ModelSource", "config_folder"]

_NAMES = ("hf", "gguf")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Tensors under the names of transformers.

    maps: name -> its map. constants: tensors that no source has. masters: float matrices of the layers are BitNet
    master weights.
    """

    checkpoint: Checkpoint
    maps: Mapping[str, TensorMap]
    constants: Mapping[str, F32] = field(default_factory=dict)
    masters: bool = False
    rounds_tokens: bool = False
    warnings: tuple[str, ...] = ()

    def rounding(self, activations: Activations) -> Rounding:
        """Return the rounding of inputs of packed weights."""
        return "none" if activations == "float" else "token" if self.rounds_tokens else "block"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor."""
        constants = {name: array.shape for name, array in self.constants.items()}
        return {name: m.shape for name, m in self.maps.items()} | constants

    def is_packed(self, name: str) -> bool:
        """True if the stored tensor is quantized."""
        tensor_map = self.maps.get(name)
        return tensor_map is not None and any(
            self.checkpoint[source].codec.form is not Floats for source in tensor_map.sources
        )

    def weight(self, name: str) -> Weight:
        """Return the tensor: a view of the file where its rows are stored together, otherwise made in memory.

        Raises UnsupportedError for a type that is not decoded.
        """
        tensor_map = self.maps[name]
        stored = [self.checkpoint[source] for source in tensor_map.sources]
        for weight in stored:
            integer = claims(weight.codec, MaybeIntegers) and weight.codec.is_integer  # type: ignore[type-abstract]
            if claims(weight.codec, Opaque) or integer:  # type: ignore[type-abstract]
                raise UnsupportedError(
                    f"stored as {weight.codec.name}, which cannot be decoded as a weight",
                    file=self.checkpoint.path,
                    tensor=weight.name,
                )
        if len(stored) == 1 and (span := _span(stored[0], tensor_map)) is not None:
            return replace(row_span(stored[0], span), name=name, shape=tensor_map.shape)
        return replace(materialize(self.checkpoint, tensor_map), name=name)

    def transposed(self, name: str) -> Weight | None:
        """Return the transpose of a matrix that is stored transposed, None for others."""
        tensor_map = self.maps[name]
        steps = steps_of(tensor_map.op)
        if not steps or not isinstance(steps[-1], Transpose):
            return None
        *stack, n, k = tensor_map.shape
        turned = replace(tensor_map, shape=(*stack, k, n), op=chain(*steps[:-1]))
        return replace(self, maps={name: turned}).weight(name)


def _of_blocks(tensor_map: TensorMap, checkpoint: Checkpoint) -> TensorMap:
    """Return the map to the float tensor of GPT-OSS's packed experts: X_blocks is the transpose of X."""
    packed = any(claims(checkpoint[name].codec, HoldsBlocks) for name in tensor_map.sources)  # type: ignore[type-abstract]
    if not packed or not tensor_map.target.endswith("_blocks"):
        return tensor_map
    *stack, n, k = tensor_map.shape
    target = tensor_map.target.removesuffix("_blocks")
    return replace(tensor_map, target=target, shape=(*stack, k, n), op=chain(tensor_map.op, Transpose()))


def _span(weight: Weight, tensor_map: TensorMap) -> slice | None:
    """Return the consecutive stored rows that are the target, None if there are none: for experts of a stack."""
    rows, k = as_matrix(tensor_map.shape)
    whole = isinstance(tensor_map.op, Same)
    if whole or not (weight.codec.row_sliced and rows and tensor_map.op.keeps_rows([weight.shape])):
        return None
    if k != weight.shape[-1] or any(a.spec.shape[:1] != (as_matrix(weight.shape)[0],) for a in weight.arrays.values()):
        return None
    (needed,) = tensor_map.op.needs(np.arange(rows), [weight.shape])
    if len(needed) != rows or not bool((np.diff(needed) == 1).all()):
        return None
    return slice(int(needed[0]), int(needed[-1]) + 1)


@contextmanager
def config_folder(checkpoint: Checkpoint) -> Iterator[tuple[Path, ModelSource]]:
    """Yield a folder with the configuration and tokenizer files, temporary for GGUF, and the tensors.

    Raises InputError, and UnsupportedError for an unsupported architecture.
    """
    if checkpoint.naming not in _NAMES:
        raise UnsupportedError("transformers cannot run this format", file=checkpoint.path, found=checkpoint.format)
    if checkpoint.naming == "hf":
        if not (Path(checkpoint.path) / "config.json").is_file():
            raise InputError(
                "transformers requires a local folder with a config.json", file=checkpoint.path,
                hint="download the folder first",
            )  # fmt: skip
        record = of_config(checkpoint.config)
        rounds = record is not None and rounds_tokens(checkpoint, record)
        masters = rounds and not checkpoint.describes_itself
        stored = (_of_blocks(m, checkpoint) for m in usual_tensors(checkpoint))
        maps, warnings = usual_names(checkpoint, {m.target: m for m in stored}, record)
        source = ModelSource(checkpoint, maps, masters=masters, rounds_tokens=rounds, warnings=tuple(warnings))
        yield Path(checkpoint.path), source
        return
    translation = to_hf(checkpoint)
    record = of_metadata(checkpoint.metadata)
    if translation.unknown or record is None:
        reason = translation.unknown[0] if translation.unknown else "unknown architecture"
        raise UnsupportedError(reason, file=checkpoint.path, hint="see `polyquant architectures`")
    with TemporaryDirectory(prefix="polyquant-") as temporary:
        for name, data in translation.files.items():
            file = Path(temporary) / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data)
        maps = {m.target: m for m in translation.tensors}
        rounds = rounds_tokens(checkpoint, record)
        source = ModelSource(
            checkpoint, maps, translation.constants, rounds_tokens=rounds, warnings=translation.warnings
        )
        yield Path(temporary), source
