"""The identity of a checkpoint, from its headers: architecture, decoder's tensor names, hyper-parameters, activation
rounding.

Unsupported architectures are rejected by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import replace
from typing import Any

from polyquant.architectures.find import of_config, of_metadata, refuse_single_file
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.record import Architecture
from polyquant.architectures.rope_tensors import restored
from polyquant.capabilities import HoldsBlocks, claims
from polyquant.codecs.affine_forms import only_read
from polyquant.errors import InputError, UnsupportedError
from polyquant.runtime.c8 import grid_name
from polyquant.types import Checkpoint

__all__ = ["architecture", "hyper_parameters", "names", "rounds_tokens"]


def architecture(checkpoint: Checkpoint) -> Architecture:
    """Return the architecture. Raises UnsupportedError for an unsupported architecture, variant or quantization."""
    if checkpoint.naming == "gguf":
        label = checkpoint.metadata.get("general.architecture")
        record = of_metadata(checkpoint.metadata)
    else:
        if not checkpoint.config:
            refuse_single_file(checkpoint)
            raise InputError(
                "the folder has no config.json to identify its model",
                file=checkpoint.path,
                expected="a folder with config.json",
            )
        label = checkpoint.config.get("model_type") or checkpoint.config.get("architectures")
        record = of_config(checkpoint.config)
    if record is None:
        raise UnsupportedError(
            f"architecture '{label}' is not supported" if label else "the architecture is not specified",
            file=checkpoint.path,
            hint="see `polyquant architectures`; its weights can be converted: polyquant convert --allow-unknown",
        )
    experts = _declared(checkpoint, f"{record.name}.expert_count", "num_local_experts", "num_experts")
    if not record.has_experts and experts and experts != 1:  # some dense models declare 1
        raise UnsupportedError(
            f"a mixture of experts is not supported in architecture '{record.name}'",
            file=checkpoint.path,
            found=f"{experts} experts",
            hint="its weights can be converted: polyquant convert",
        )
    _refuse_missing_scales(checkpoint)
    return record


_READ = ("bitnet", "exl3")  # quantizations whose scales are part of the weights
_UNNAMED = "mlx"  # MLX describes its weights without naming a method
_DECODED = (
    "gptq",
    "awq",
    "compressed-tensors",
    "fp8",
    "fbgemm_fp8",
    "mxfp4",
    "modelopt",
    "bitsandbytes",
    "hqq",
    "torchao",
    "quark",
    _UNNAMED,
)  # the same, if weights were decoded


def _declared(checkpoint: Checkpoint, metadata_key: str, *config_keys: str) -> Any:
    """Return the value of a metadata or config.json key, None if absent."""
    if checkpoint.naming == "gguf":
        return checkpoint.metadata.get(metadata_key)
    return next((checkpoint.config[k] for k in config_keys if checkpoint.config.get(k) is not None), None)


def _refuse_missing_scales(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError for a folder whose declared quantization matches none of its weights.

    They may be codes without scales. (A folder with an undecoded quantization does not open.)
    """
    if checkpoint.describes_itself:
        return
    file = checkpoint.path / "config.json"
    decoded = any(only_read(w.codec) or claims(w.codec, HoldsBlocks) for w in checkpoint.values())  # type: ignore[type-abstract]
    bits = checkpoint.config.get("quantization_bit")
    if bits and not decoded:
        raise UnsupportedError(
            f"config.json declares ChatGLM's quantization (quantization_bit {bits}), but no weight has it",
            file=file,
            hint="set quantization_bit to 0 if the weights are floats",
        )
    declared = checkpoint.config.get("quantization_config")
    if not declared:
        return
    method = declared.get("quant_method", _UNNAMED) if isinstance(declared, Mapping) else declared
    if method not in _READ and not (method in _DECODED and decoded):
        raise UnsupportedError(
            f"config.json declares quantization method '{method}', but no weight has it",
            file=file,
            expected=f"{', '.join((*_READ, *_DECODED))}, a Trellis folder, or none",
        )
    if declared.get("use_rms_norm"):
        raise UnsupportedError("BitNet linears with their own norm (use_rms_norm) are not supported", file=file)


def rounds_tokens(checkpoint: Checkpoint, architecture: Architecture) -> bool:
    """True if activations are rounded with one int8 scale per token, as BitNet is trained.

    Some GGUF architectures use one per block.
    """
    ternary = architecture.ternary
    if checkpoint.naming == "gguf":
        return ternary is not None and ternary.tokens_in_gguf
    declared = checkpoint.config.get("quantization_config")
    return ternary is not None or (isinstance(declared, Mapping) and declared.get("quant_method") == "bitnet")


def names(checkpoint: Checkpoint, architecture: Architecture) -> dict[str, str]:
    """Return decoder's name -> name in the checkpoint."""
    if checkpoint.naming == "gguf":
        return _with_suffix({name: name for name in checkpoint}, architecture)
    stored = {target: name for name in checkpoint if (target := architecture.names.to_gguf(name)) is not None}
    if checkpoint.describes_itself:
        stored |= {target: name for name in checkpoint if (target := grid_name(architecture, name)) is not None}
        stored |= {target: name for name in checkpoint if (target := _module_name(architecture, name)) is not None}
    return _with_suffix(stored, architecture)


def _with_suffix(stored_names: dict[str, str], architecture: Architecture) -> dict[str, str]:
    """Add `.weight` to the names of norms that GGUF stores without a suffix: Falcon-H1's ffn_norm."""
    bare = {feed.source for feed in architecture.feeds("norm")} & set(architecture.names.exact.values())
    named = {
        f"{name}.weight": stored for name, stored in stored_names.items() if bare and name.split(".", 2)[-1] in bare
    }
    return named | stored_names if named else stored_names


def _module_name(architecture: Architecture, name: str) -> str | None:
    """Return the decoder's name of `norm.module.weight`; None for other tensors."""
    stem, _, suffix = name.rpartition(".")
    if not stem.endswith(".module"):
        return None
    known = architecture.names.to_gguf(f"{stem.removesuffix('.module')}.{suffix}")
    return None if known is None else f"{known.removesuffix(f'.{suffix}')}.module.{suffix}"


def hyper_parameters(checkpoint: Checkpoint, architecture: Architecture, names: Mapping[str, str]) -> Hyper:
    """Return the hyper-parameters.

    Raises InputError for invalid ones, UnsupportedError for unsupported RoPE scalings.
    """
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
            f"RoPE scaling '{scaling}' is not supported", file=checkpoint.path, hint="known: linear, yarn, longrope"
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
