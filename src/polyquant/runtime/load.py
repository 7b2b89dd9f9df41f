"""A checkpoint -> a Model that runs."""

from __future__ import annotations

import os
from typing import Literal

from polyquant.errors import InputError, UnsupportedError
from polyquant.formats.detect import open_checkpoint
from polyquant.models.config import Hyper, from_config, from_metadata
from polyquant.models.names import Family, to_gguf_name
from polyquant.models.rope import FREQS
from polyquant.models.translate import FAMILIES, family_of
from polyquant.ops.matmul import Rounding
from polyquant.runtime.bitnet import BitNetLayer
from polyquant.runtime.decoder import Decoder, Layer
from polyquant.runtime.llama import LlamaLayer
from polyquant.runtime.model import Model
from polyquant.runtime.rope import rotary
from polyquant.runtime.tensors import Tensors
from polyquant.types import Checkpoint

__all__ = ["Activations", "load"]

Activations = Literal["int8", "float"]


def load(path: str | os.PathLike[str], *, activations: Activations = "int8", context: int | None = None) -> Model:
    """Open a checkpoint to run it. Weights stay packed in their file.

    activations: "int8" rounds the inputs of quantized weights (blocks of 32 numbers, or tokens for BitNet), as their fast kernels do; "float"
    does not. context: most positions of a text, fewer than the model was made for. Raises InputError, UnsupportedError.
    """
    checkpoint = open_checkpoint(path)
    family = _family(checkpoint)
    names = _names(checkpoint, family)
    hyper = _hyper(checkpoint, family, names)
    rounding: Rounding = "block" if activations == "int8" else "none"
    tensors = Tensors(checkpoint, names, rounding)
    if context is not None and not 1 <= context <= hyper.context:
        raise InputError(
            "context is out of range", file=checkpoint.path, expected=f"1 to {hyper.context} tokens", found=context
        )
    return Model(checkpoint, family, build(tensors, family, hyper), context=context)


def build(tensors: Tensors, family: Family, hyper: Hyper) -> Decoder:
    """The decoder of an architecture. Raises InputError for missing and misshapen tensors."""
    interleaved = family.interleaved and tensors.checkpoint.format == "gguf"
    divisors = tensors.vector(FREQS, hyper.head_size // 2) if FREQS in tensors else None
    embedding = tensors.weight("token_embd.weight", (hyper.vocab, hyper.hidden))
    head = "output" if "output.weight" in tensors and not hyper.tied else "token_embd"
    if hyper.layers > len(tensors.names):  # before a list of that length is made
        raise InputError("more layers than tensors", file=tensors.checkpoint.path, found=hyper.layers)
    layers: list[Layer] = []
    for i in range(hyper.layers):
        if family.ternary:
            layers.append(BitNetLayer(tensors, hyper, i, silu=family.architecture == "bitnet"))
        else:
            layers.append(LlamaLayer(tensors, hyper, i))
    return Decoder(
        hyper,
        embedding,
        layers,
        tensors.vector("output_norm.weight", hyper.hidden),
        tensors.linear(hyper.hidden, [(head, hyper.vocab)]),
        rotary(hyper, interleaved=interleaved, divisors=divisors),
    )


def _family(checkpoint: Checkpoint) -> Family:
    if checkpoint.format == "gguf":
        label = checkpoint.metadata.get("general.architecture")
        family = FAMILIES.get(label) if isinstance(label, str) else None
    else:
        label = checkpoint.config.get("model_type") or checkpoint.config.get("architectures")
        family = family_of(checkpoint.config)
    if family is None:
        raise UnsupportedError(
            f"architecture '{label}' is not run here",
            file=checkpoint.path,
            hint=f"known: {', '.join(FAMILIES)}; its weights still convert: polyquant convert",
        )
    return family


def _names(checkpoint: Checkpoint, family: Family) -> dict[str, str]:
    if checkpoint.format == "gguf":
        return {name: name for name in checkpoint}
    return {target: name for name in checkpoint if (target := to_gguf_name(family, name)) is not None}


def _hyper(checkpoint: Checkpoint, family: Family, names: dict[str, str]) -> Hyper:
    table = checkpoint.weights.get(names.get("token_embd.weight", ""))
    rows = table.shape[0] if table is not None and len(table.shape) == 2 else 0
    if checkpoint.format == "gguf":
        return from_metadata(
            checkpoint.metadata,
            family.architecture,
            vocab=rows,
            tied="output.weight" not in names,
            file=checkpoint.path,
        )
    return from_config(
        checkpoint.config, vocab=rows, default_theta=family.default_theta, file=checkpoint.path / "config.json"
    )
