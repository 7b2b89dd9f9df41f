"""What a checkpoint is, before a tensor is looked at: its architecture, the decoder's names for its tensors, its hyper-parameters, and how its linears
were trained. What is not run is refused here by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import replace
from typing import Any

from polyquant.architectures.find import of_config, of_metadata
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.record import Architecture
from polyquant.architectures.rope_tensors import restored
from polyquant.capabilities import HoldsBlocks
from polyquant.codecs.affine_forms import only_read
from polyquant.errors import InputError, UnsupportedError
from polyquant.runtime.c8 import grid_name
from polyquant.types import Checkpoint

__all__ = ["architecture", "hyper_parameters", "names", "rounds_tokens"]


def architecture(checkpoint: Checkpoint) -> Architecture:
    """Raises UnsupportedError for an architecture, a variant or a quantization that is not run."""
    if checkpoint.naming == "gguf":
        label = checkpoint.metadata.get("general.architecture")
        found = of_metadata(checkpoint.metadata)
    else:
        if not checkpoint.config:
            raise InputError(
                "nothing says what these tensors mean", file=checkpoint.path, expected="a folder with config.json"
            )
        label = checkpoint.config.get("model_type") or checkpoint.config.get("architectures")
        found = of_config(checkpoint.config)
    if found is None:
        raise UnsupportedError(
            f"architecture '{label}' is not run here" if label else "no architecture is named",
            file=checkpoint.path,
            hint="see `polyquant architectures`; its weights still convert: polyquant convert --allow-unknown",
        )
    experts = _said(checkpoint, f"{found.name}.expert_count", "num_local_experts", "num_experts")
    if not found.has_experts and experts and experts != 1:  # some dense models say 1
        raise UnsupportedError(
            "a mixture of experts is not run here",
            file=checkpoint.path,
            found=f"{experts} experts",
            hint="its weights still convert: polyquant convert",
        )
    _refuse_foreign_scales(checkpoint)
    return found


_READ = ("bitnet", "exl3")  # quantizations whose scales the weights carry
_DECODED = ("gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4")  # the same, where weights were decoded


def _said(checkpoint: Checkpoint, metadata_key: str, *config_keys: str) -> Any:
    """The value of a key of the metadata or of the config, None where neither says it."""
    if checkpoint.naming == "gguf":
        return checkpoint.metadata.get(metadata_key)
    return next((checkpoint.config[k] for k in config_keys if checkpoint.config.get(k) is not None), None)


def _refuse_foreign_scales(checkpoint: Checkpoint) -> None:
    """A folder that names a quantization which none of its weights has: they may be codes without their scales. (What is not decoded does not open.)"""
    if checkpoint.describes_itself:
        return
    file = checkpoint.path / "config.json"
    decoded = any(only_read(w.codec) or isinstance(w.codec, HoldsBlocks) for w in checkpoint.values())
    bits = checkpoint.config.get("quantization_bit")
    if bits and not decoded:
        raise UnsupportedError(
            f"config.json says ChatGLM's own quantization (quantization_bit {bits}), and no weight is quantized so",
            file=file,
            hint="set quantization_bit to 0 if these are floats",
        )
    said = checkpoint.config.get("quantization_config")
    if not said:
        return
    method = said.get("quant_method") if isinstance(said, Mapping) else said
    if method not in _READ and not (method in _DECODED and decoded):
        raise UnsupportedError(
            f"config.json says quantization method '{method}', and no weight is quantized so",
            file=file,
            expected=f"{', '.join((*_READ, *_DECODED))}, a Trellis folder, or none",
        )
    if said.get("use_rms_norm"):
        raise UnsupportedError("BitNet linears with a norm of their own (use_rms_norm) are not run", file=file)


def rounds_tokens(checkpoint: Checkpoint, architecture: Architecture) -> bool:
    """True where activations have one int8 scale a token: BitNet as it was trained. Some GGUF architectures have one a block."""
    ternary = architecture.ternary
    if checkpoint.naming == "gguf":
        return ternary is not None and ternary.tokens_in_gguf
    said = checkpoint.config.get("quantization_config")
    return ternary is not None or (isinstance(said, Mapping) and said.get("quant_method") == "bitnet")


def names(checkpoint: Checkpoint, architecture: Architecture) -> dict[str, str]:
    """Decoder's name -> name in the checkpoint."""
    if checkpoint.naming == "gguf":
        return _with_suffix({name: name for name in checkpoint}, architecture)
    found = {target: name for name in checkpoint if (target := architecture.names.to_gguf(name)) is not None}
    if checkpoint.describes_itself:
        found |= {target: name for name in checkpoint if (target := grid_name(architecture, name)) is not None}
        found |= {target: name for name in checkpoint if (target := _twin_name(architecture, name)) is not None}
    return _with_suffix(found, architecture)


def _with_suffix(found: dict[str, str], architecture: Architecture) -> dict[str, str]:
    """The same, with `.weight` behind the names of norms that GGUF calls without: Falcon-H1's ffn_norm."""
    bare = {feed.source for feed in architecture.feeds("norm")} & set(architecture.names.exact.values())
    named = {f"{name}.weight": stored for name, stored in found.items() if bare and name.split(".", 2)[-1] in bare}
    return named | found if named else found


def _twin_name(architecture: Architecture, name: str) -> str | None:
    """The decoder's name of `norm.module.weight`; None for other tensors."""
    stem, _, suffix = name.rpartition(".")
    if not stem.endswith(".module"):
        return None
    known = architecture.names.to_gguf(f"{stem.removesuffix('.module')}.{suffix}")
    return None if known is None else f"{known.removesuffix(f'.{suffix}')}.module.{suffix}"


def hyper_parameters(checkpoint: Checkpoint, architecture: Architecture, names: Mapping[str, str]) -> Hyper:
    """Raises InputError for what cannot be right, UnsupportedError for RoPE scalings that are not run."""
    table = checkpoint.weights.get(names.get("token_embd.weight", ""))
    rows = table.shape[0] if table is not None and len(table.shape) == 2 else 0
    if checkpoint.naming != "gguf":
        file = checkpoint.path / "config.json"
        return architecture.hyper.read_config(checkpoint.config, vocab=rows, file=file)
    metadata, tied = checkpoint.metadata, "output.weight" not in names
    scaling = metadata.get(f"{architecture.name}.rope.scaling.type")
    listed = "rope_factors_long.weight" in checkpoint.weights
    if scaling not in (None, "none", "linear", "yarn", *(("longrope",) * listed)):
        raise UnsupportedError(
            f"RoPE scaling '{scaling}' is not run", file=checkpoint.path, hint="known: linear, yarn, longrope"
        )
    hyper = architecture.hyper.read_metadata(metadata, architecture.name, vocab=rows, tied=tied, file=checkpoint.path)
    if listed:
        hyper = replace(hyper, rope=restored(checkpoint, hyper, {}, []) or {})
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Sized) and not isinstance(tokens, str) and len(tokens) > hyper.vocab:
        raise InputError(
            "the tokenizer has more tokens than the model",
            file=checkpoint.path,
            expected=f"at most {hyper.vocab}",
            found=len(tokens),
        )
    return hyper
