"""A checkpoint -> a Model that runs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from polyquant.codecs.tl import Tile
from polyquant.errors import InputError, UnsupportedError, printable
from polyquant.formats.detect import open_checkpoint
from polyquant.models.config import Hyper, from_config, from_metadata
from polyquant.models.names import Family, to_gguf_name
from polyquant.models.rope import FREQS
from polyquant.models.translate import FAMILIES, family_of
from polyquant.ops.matmul import Rounding
from polyquant.runtime.bitnet import BitNetLayer
from polyquant.runtime.chatglm import ChatGLMLayer
from polyquant.runtime.decoder import Decoder, Layer
from polyquant.runtime.llama import LlamaLayer
from polyquant.runtime.model import Model
from polyquant.runtime.rope import rotary
from polyquant.runtime.tensors import Tensors
from polyquant.types import Checkpoint, Floats

__all__ = ["Activations", "load"]

Activations = Literal["int8", "float"]
_COMPUTED = re.compile(r".*(rotary_(pos_)?emb\.inv_freq|\.attention\.(masked_)?bias)")


def load(
    path: str | os.PathLike[str],
    *,
    activations: Activations = "int8",
    context: int | None = None,
    ternary_layout: str | None = None,
    dialect: str | None = None,
    tile: Tile | None = None,
) -> Model:
    """Open a checkpoint to run it. Weights stay packed in their file; only norms and biases are read.

    activations: "int8" rounds the inputs of quantized weights (blocks of 32 numbers, or tokens for BitNet), as their fast kernels do; "float"
    does not. context: most positions of a text, fewer than the model was made for. ternary_layout, dialect, tile: what a GGUF file of BitNet weights cannot tell, see open_checkpoint. A folder of BitNet master
    weights is made ternary in memory, and its notes say so. Raises InputError, UnsupportedError.
    """
    if activations not in ("int8", "float"):
        raise InputError("unknown activations", expected="int8 or float", found=activations)
    checkpoint = open_checkpoint(path, ternary_layout=ternary_layout, dialect=dialect, tile=tile)
    family = _family(checkpoint)
    names = _names(checkpoint, family)
    hyper = _hyper(checkpoint, family, names)
    bitnet = _quantization(checkpoint)
    masters = checkpoint.format == "hf" and (family.ternary or bitnet)
    rounding: Rounding = "block"
    if activations == "float":
        rounding = "none"
    elif bitnet or (family.ternary and not _is_llama_cpp_bitnet(checkpoint, family)):
        rounding = "token"
    tensors = Tensors(checkpoint, names, family, rounding, masters=masters)
    if context is not None and not 1 <= context <= hyper.context:
        raise InputError(
            "context is out of range", file=checkpoint.path, expected=f"1 to {hyper.context} tokens", found=context
        )
    decoder = build(tensors, family, hyper)
    return Model(_with_notes(tensors), family, decoder, context=context)


def build(tensors: Tensors, family: Family, hyper: Hyper) -> Decoder:
    """The decoder of an architecture. Raises InputError for missing and misshapen tensors."""
    file = tensors.checkpoint.path
    gguf = tensors.checkpoint.format == "gguf"
    if hyper.layers > len(tensors.names):  # before a list of that length is made
        raise InputError("more layers than tensors", file=file, found=hyper.layers)
    embedding = tensors.weight("token_embd.weight", (hyper.vocab, hyper.hidden))
    layers: list[Layer] = []
    for i in range(hyper.layers):
        if family.ternary:
            layers.append(BitNetLayer(tensors, hyper, i, silu=_gates_with_silu(tensors.checkpoint, family)))
        elif family.architecture == "chatglm":
            layers.append(ChatGLMLayer(tensors, hyper, i))
        else:
            layers.append(LlamaLayer(tensors, hyper, i))
    norm = tensors.vector("output_norm.weight", hyper.hidden)
    head = tensors.linear(hyper.hidden, [("token_embd" if hyper.tied else "output", hyper.vocab)])
    divisors = tensors.vector(FREQS, hyper.rotary_size // 2) if FREQS in tensors else None
    turns = rotary(hyper, interleaved=family.pairs or (family.interleaved and gguf), divisors=divisors, file=file)
    return Decoder(hyper, embedding, layers, norm, head, turns)


def _family(checkpoint: Checkpoint) -> Family:
    """Raises UnsupportedError for an architecture that is not run, by its name."""
    if checkpoint.format == "gguf":
        label = checkpoint.metadata.get("general.architecture")
        family = FAMILIES.get(label) if isinstance(label, str) else None
    else:
        if not checkpoint.config:
            raise InputError(
                "nothing says what these tensors mean", file=checkpoint.path, expected="a folder with config.json"
            )
        label = checkpoint.config.get("model_type") or checkpoint.config.get("architectures")
        family = family_of(checkpoint.config)
    if family is None:
        raise UnsupportedError(
            f"architecture '{label}' is not run here",
            file=checkpoint.path,
            hint=f"known: {', '.join(FAMILIES)}; its weights still convert: polyquant convert",
        )
    experts = _said(checkpoint, f"{family.architecture}.expert_count", "num_local_experts", "num_experts")
    if experts:
        raise UnsupportedError(
            "a mixture of experts is not run here",
            file=checkpoint.path,
            found=f"{experts} experts",
            hint="its weights still convert",
        )
    act = _said(checkpoint, "", "hidden_act", "hidden_activation")
    if act not in (None, "silu", "swish") and not (family.ternary and act == "relu2"):
        raise UnsupportedError(f"activation '{act}' is not run in this architecture", file=checkpoint.path)
    return family


def _said(checkpoint: Checkpoint, metadata_key: str, *config_keys: str) -> Any:
    """The value of a key of the metadata or of the config, None where neither says it."""
    if checkpoint.format == "gguf":
        return checkpoint.metadata.get(metadata_key)
    return next((checkpoint.config[k] for k in config_keys if checkpoint.config.get(k) is not None), None)


def _quantization(checkpoint: Checkpoint) -> bool:
    """True for a folder whose linears are BitNet's. Raises UnsupportedError for quantizations whose scales are not read."""
    said = checkpoint.config.get("quantization_config")
    if not isinstance(said, Mapping) or not said:
        return False
    if said.get("quant_method") != "bitnet":
        raise UnsupportedError(
            f"quantization method '{said.get('quant_method')}' is not run",
            file=checkpoint.path / "config.json",
            expected="bitnet, or none",
        )
    if said.get("use_rms_norm"):
        raise UnsupportedError(
            "BitNet linears with a norm of their own (use_rms_norm) are not run", file=checkpoint.path
        )
    return True


def _is_llama_cpp_bitnet(checkpoint: Checkpoint, family: Family) -> bool:
    return checkpoint.format == "gguf" and family.architecture == "bitnet"


def _gates_with_silu(checkpoint: Checkpoint, family: Family) -> bool:
    """llama.cpp's `bitnet` graph does so always; a folder says it."""
    if checkpoint.format == "gguf":
        return family.architecture == "bitnet"
    return checkpoint.config.get("hidden_act", "silu" if family.architecture == "bitnet" else "relu2") in (
        "silu",
        "swish",
    )


def _names(checkpoint: Checkpoint, family: Family) -> dict[str, str]:
    if checkpoint.format == "gguf":
        return {name: name for name in checkpoint}
    return {target: name for name in checkpoint if (target := to_gguf_name(family, name)) is not None}


def _hyper(checkpoint: Checkpoint, family: Family, names: dict[str, str]) -> Hyper:
    table = checkpoint.weights.get(names.get("token_embd.weight", ""))
    rows = table.shape[0] if table is not None and len(table.shape) == 2 else 0
    if checkpoint.format != "gguf":
        config = family.reads(checkpoint.config)
        return from_config(config, vocab=rows, default_theta=family.default_theta, file=checkpoint.path / "config.json")
    metadata, tied = checkpoint.metadata, "output.weight" not in names
    scaling = metadata.get(f"{family.architecture}.rope.scaling.type")
    if scaling not in (None, "none", "linear", "yarn"):
        raise UnsupportedError(f"RoPE scaling '{scaling}' is not run", file=checkpoint.path, hint="known: linear, yarn")
    hyper = from_metadata(metadata, family.architecture, vocab=rows, tied=tied, file=checkpoint.path)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is not None and not isinstance(tokens, str) and hasattr(tokens, "__len__") and len(tokens) > hyper.vocab:
        raise InputError(
            "the tokenizer has more tokens than the embedding has rows",
            file=checkpoint.path,
            expected=f"at most {hyper.vocab}",
            found=len(tokens),
        )
    return hyper


def _with_notes(tensors: Tensors) -> Checkpoint:
    """The checkpoint, with what was done to it and what was left aside among its notes."""
    checkpoint, notes = tensors.checkpoint, []
    used = {tensors.names[name] for name in tensors.used}
    made = [n for n in used if tensors.masters and checkpoint[n].codec.form is Floats and len(checkpoint[n].shape) == 2]
    made = [n for n in made if (to_gguf_name(tensors.family, n) or "").startswith("blk.")]
    if made:
        notes.append(f"{len(made)} BitNet master weights were rounded to ternary in memory (absmean)")
    left = [n for n in checkpoint if n not in used and not _COMPUTED.fullmatch(n)]
    if left:
        notes.append(f"{len(left)} tensors are not part of this decoder and are not used (first: {printable(left[0])})")
    return replace(checkpoint, notes=(*checkpoint.notes, *notes))
