"""Translation of a checkpoint into another naming scheme: names, row order, metadata, tokenizer.

    to_gguf: Hugging Face -> GGUF, in the order and with the value types of llama.cpp's converter
    to_hf:   GGUF -> Hugging Face, its inverse

Only headers, configuration and tokenizer are read (and the small tensors of RoPE divisors and activations). The caller,
which knows the codecs, sets `general.file_type`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyquant.architectures import layer_numbers, pooling, rope_tensors, sampling_defaults
from polyquant.architectures.find import by_name, known, of_config, of_metadata, refuse_single_file
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.mlx import mlx_names
from polyquant.architectures.record import Architecture
from polyquant.architectures.separate_experts import first_separate
from polyquant.architectures.tensors import gguf_maps, hf_maps, is_float_tensor, usual_maps
from polyquant.errors import InputError, PlanError, UnknownNameError, UnsupportedError, printable
from polyquant.gguf_values import string, u32
from polyquant.storage import strict_json
from polyquant.storage.folder import MODULES
from polyquant.storage.locations import is_remote
from polyquant.tokenizers import reading as tokenizer
from polyquant.tokenizers import vocabulary
from polyquant.tokenizers import writing as tokenizer_files
from polyquant.types import F32, Checkpoint, Meta, Shape, TensorMap, Translation, Weight

__all__ = ["float_config", "mismatches", "to_gguf", "to_hf", "usual_tensors"]

_FLOAT_CODECS = frozenset({"f32", "f16", "bf16", "f64"})
_COMPUTED = (
    ".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq", ".attention.bias", ".attention.masked_bias",
)  # fmt: skip
"""Ends of the names of stored constants."""
_CACHE_SCALES = (".k_scale", ".v_scale")
"""Ends of the names of scales for a quantized cache, which other programs choose at run time."""


# ---------------------------------------------------------------- Hugging Face -> GGUF


def to_gguf(
    checkpoint: Checkpoint,
    *,
    architecture: str | None = None,
    with_tokenizer: bool = True,
    name: str | None = None,
    pre: str | None = None,
) -> Translation:
    """Return GGUF names and metadata of a Hugging Face checkpoint.

    architecture: another GGUF architecture than the usual one (`bitnet` for llama.cpp's BitNet). name: general.name, by
    default derived from the folder. pre: llama.cpp's name of the pre-tokenizer, by default recognized by its behaviour.
    Unknown architectures keep their tensor names, with a warning. Raises InputError, UnknownNameError, PlanError,
    UnsupportedError.
    """
    config = checkpoint.config
    refuse_single_file(checkpoint)
    family = of_config(config)
    if architecture is not None:
        requested = by_name(architecture)
        if requested is None:
            raise UnknownNameError("architecture", architecture, known())
        if family is not None and requested.name != family.name and requested.model_type != family.model_type:
            raise PlanError(
                f"a model of type '{family.model_type}' cannot become architecture '{architecture}'",
                file=checkpoint.path,
            )
        family = family if family is not None and requested.name == family.name else requested
    warnings: list[str] = []
    unknown: list[str] = []
    dropped: dict[str, str] = {}
    constants: dict[str, F32] = {}
    hyper = None
    label = family.name if family else str(config.get("model_type") or "unknown")
    if family is None:
        unknown.append(
            f"architecture '{printable(label)}' is unknown: tensors keep their own names and no hyper-parameters "
            "are written; llama.cpp will not run this file"
        )
        tensors = tuple(TensorMap(w.name, (w.name,), w.shape, keep_float=len(w.shape) < 2) for w in checkpoint.values())
    else:
        hyper = _hyper(checkpoint, family)
        tensors = _gguf_tensors(checkpoint, family, hyper, dropped, unknown)
        constants |= rope_tensors.constants(hyper, checkpoint.path)
    metadata = _general(checkpoint, label, name, _size_label({t.target: t.shape for t in tensors}))
    if family is not None and hyper is not None:
        metadata |= _sizes(family, hyper, config, warnings) | layer_numbers.metadata(checkpoint, family, hyper.layers)
        metadata |= _pooling(checkpoint, family, hyper, warnings)
    metadata["general.quantization_version"] = u32(2)
    if with_tokenizer:
        rows = next((t.shape[0] for t in tensors if t.target == "token_embd.weight"), None)
        vocab = tokenizer.from_files(checkpoint.files, config, rows=rows, pre=pre)
        metadata |= vocab.metadata()
        warnings += vocab.warnings
        if vocab.prefix:
            words = " ".join(vocab.tokens[i] for i in vocab.prefix)
            warnings.append(f"GGUF cannot express that every input starts with {words}: prepend it yourself")
    return Translation(
        label,
        tensors,
        metadata=metadata,
        dropped=dropped,
        constants=constants,
        warnings=tuple(warnings),
        unknown=tuple(unknown),
    )


def _pooling(checkpoint: Checkpoint, family: Architecture, hyper: Hyper, warnings: list[str]) -> dict[str, Meta]:
    """Return the pooling metadata of an embedding model; a decoder with an unsupported pooling only gets a warning."""
    if not family.encoder and MODULES not in checkpoint.files:
        return {}
    try:
        return pooling.to_metadata(checkpoint.files, family.name, hyper)
    except UnsupportedError as problem:
        if family.encoder:
            raise
        warnings.append(f"{problem.message}: the GGUF file does not specify how token vectors are pooled")
        return {}


def _hyper(checkpoint: Checkpoint, family: Architecture) -> Hyper:
    usual = family.names.to_hf("token_embd.weight")
    spelled = (
        usual
        if usual in checkpoint
        else next(  # bare decoders omit the root prefix
            (name for name in checkpoint if family.names.to_gguf(name) == "token_embd.weight"), None
        )
    )
    rows = checkpoint[spelled].shape[0] if spelled is not None and checkpoint[spelled].shape else 0
    file = checkpoint.path / "config.json"
    return family.hyper.read_config(checkpoint.config, vocab=rows, file=file)


def _gguf_tensors(
    checkpoint: Checkpoint, family: Architecture, hyper: Hyper, dropped: dict[str, str], unknown: list[str]
) -> tuple[TensorMap, ...]:
    quantization = checkpoint.config.get("quantization_config")
    trained = isinstance(quantization, Mapping) and quantization.get("quant_method") == "bitnet"
    trained_ternary = family.ternary is not None or trained
    mapped = gguf_maps(_stored(checkpoint, family, hyper, dropped), family, hyper, checkpoint.path)
    out: dict[str, TensorMap] = {}
    for tensor_map in mapped.maps:
        if tensor_map.target in out:
            raise InputError(
                f"two tensors would become '{tensor_map.target}'",
                file=checkpoint.path,
                tensor=tensor_map.sources[0],
                found=out[tensor_map.target].origin,
            )
        stem = tensor_map.target.split(".")[2] if tensor_map.target.startswith("blk.") else ""
        ternary = trained_ternary and stem in family.linears and tensor_map.target.endswith(".weight")
        out[tensor_map.target] = replace(
            tensor_map,
            ternarize=ternary and checkpoint[tensor_map.sources[0]].codec.name in _FLOAT_CODECS,
            keep_float=is_float_tensor(tensor_map.target, tensor_map.shape),
        )
    if mapped.strange:
        unknown.append(
            f"{len(mapped.strange)} tensors are not part of architecture '{family.name}' and keep their names "
            f"(first: {printable(mapped.strange[0])}); llama.cpp may refuse the file"
        )
    _report_missing(set(out), family, hyper, unknown)
    return tuple(out.values())


def _stored(checkpoint: Checkpoint, family: Architecture, hyper: Hyper, dropped: dict[str, str]) -> Iterator[Weight]:
    """Yield the tensors that GGUF stores; add the others to `dropped` with a reason."""
    for weight in checkpoint.values():
        if weight.name.endswith(_COMPUTED):
            dropped[weight.name] = "computed from the configuration, not a weight"
        elif weight.name.endswith(_CACHE_SCALES) and weight.shape in ((), (1,)):
            dropped[weight.name] = "a scale of the quantized key and value cache"
        elif (number := layer_numbers.find(weight.name, family)) is not None:
            dropped[weight.name] = f"stored as {number.key}"
        elif hyper.tied and family.names.to_gguf(weight.name) == "output.weight":
            dropped[weight.name] = "tie_word_embeddings: the head is the embedding"
        elif (reason := family.left_out(weight.name, hyper.layers)) is not None:
            dropped[weight.name] = reason
        else:
            yield weight


def _report_missing(targets: set[str], family: Architecture, hyper: Hyper, unknown: list[str]) -> None:
    if missing := _missing(targets, family, hyper):
        unknown.append(f"{len(missing)} tensors required by the configuration are missing (first: {missing[0]})")


def _missing(targets: set[str], family: Architecture, hyper: Hyper) -> list[str]:
    """GGUF names of matrices that the configuration requires."""
    top = set(family.names.top.values()) & {
        "token_embd",
        "output_norm",
        *(("output",) if hyper.tied is False else ()),
    }
    needed = [f"{stem}.weight" for stem in sorted(top)]
    for i in range(hyper.layers):
        stems = family.linears & family.layer.shapes(hyper, i).keys()
        needed += [f"blk.{i}.{stem}.weight" for stem in sorted(stems)]
    return [n for n in needed if n not in targets]


def mismatches(checkpoint: Checkpoint) -> Iterator[tuple[str | None, str]]:
    """Contradictions between the tensors of a Hugging Face checkpoint and its config.json: (tensor, message).

    There are none for an unknown architecture.
    """
    family = of_config(checkpoint.config)
    if family is None:
        return
    try:
        hyper = _hyper(checkpoint, family)
        mapped = gguf_maps(_stored(checkpoint, family, hyper, {}), family, hyper, checkpoint.path)
    except (InputError, UnsupportedError) as problem:
        detail = f" (expected {problem.expected}, found {problem.found})" if problem.expected is not None else ""
        yield None if problem.tensor is None else str(problem.tensor), problem.message + detail
        return
    if strange := mapped.strange:
        yield strange[0], f"is not a tensor of architecture '{family.name}'{_more(strange)}"
    if missing := _missing({m.target for m in mapped.maps}, family, hyper):
        yield family.names.to_hf(missing[0]) or missing[0], f"is missing{_more(missing)}"
    behind = [m for m in mapped.maps if m.target.startswith("blk.") and int(m.target.split(".")[1]) >= hyper.layers]
    if behind:
        yield (
            behind[0].sources[0],
            f"belongs to a layer after the last, num_hidden_layers is {hyper.layers}{_more(behind)}",
        )
    wanted: dict[str, Shape] = {
        "token_embd.weight": (hyper.vocab, hyper.hidden),
        "output.weight": (hyper.vocab, hyper.hidden),
    }
    for i in range(hyper.layers):
        wanted |= {f"blk.{i}.{stem}.weight": shape for stem, shape in family.layer.shapes(hyper, i).items()}
    off = [m for m in mapped.maps if m.target in wanted and _squeezed(m.shape) != _squeezed(wanted[m.target])]
    if off:
        first = off[0]
        what = f"is {list(first.shape)}, the configuration requires {list(wanted[first.target])}"
        yield first.sources[0], what + _more(off)


def _more(found: Sequence[object]) -> str:
    return f", and so for {len(found) - 1} more" if len(found) > 1 else ""


def _squeezed(shape: Shape) -> Shape:
    return tuple(n for n in shape if n != 1)


def _general(checkpoint: Checkpoint, architecture: str, name: str | None, size_label: str) -> dict[str, Meta]:
    return {
        "general.architecture": string(architecture),
        "general.type": string("model"),
        "general.name": string(name or _title(checkpoint)),
        "general.size_label": string(size_label),
        **sampling_defaults.to_gguf(checkpoint.files),
    }


def _generation(vocab: vocabulary.Vocabulary, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json: the tokens that end generation, and the recommended sampling."""
    sampling, content = sampling_defaults.to_folder(metadata), tokenizer_files.generation_config(vocab)
    if sampling:  # transformers would replace it by the defaults of config.json
        del content["_from_model_config"]
    return {**content, **sampling}


def _title(checkpoint: Checkpoint) -> str:
    """Return the model's name: from the configuration, the hub's cache layout, or the folder."""
    declared = checkpoint.config.get("_name_or_path")
    parts = checkpoint.path.absolute().parts
    cached = next((p for p in reversed(parts) if p.startswith("models--")), None)
    if isinstance(declared, str) and declared.strip("/. "):
        stem = declared.rstrip("/").rpartition("/")[2]
    elif cached:
        stem = cached.rpartition("--")[2]
    else:
        names = [p for p in parts if p not in ("hf", "/")]
        stem = names[-1] if names else "model"
        stem = stem.partition("@")[0] if is_remote(checkpoint.path) else stem  # the revision
    stem = stem.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # file names need not be UTF-8
    words = stem.replace("_", "-").split("-")
    # As in llama.cpp's converter: lower-case words are capitalized, "7B" and "v0.3" stay.
    return " ".join(w.title() if w.islower() and not re.match(r"v?\d", w) else w for w in words if w) or "model"


def _size_label(shapes: Mapping[str, Shape]) -> str:
    """Return e.g. 1.0M, or for experts "8x1.0M": their count, then the weights of one expert plus all shared ones."""
    total, stacks, one = 0, [], 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        if "_exps." not in name or len(shape) < 3:  # biases and factors of experts count as shared
            total += size
            continue
        stacks.append(shape[-3])
        one += size // stacks[-1]
    count = sum(stacks) // len(stacks) if stacks else 0
    return f"{count}x{_rounded(total + one)}" if count else _rounded(total)


def _rounded(parameters: int) -> str:
    """Format with at least two digits: 1,048,000 -> 1.0M."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (0, "K")):
        if parameters > limit or not limit:
            scaled = parameters / (limit or 1e3)
            digits = max(2 - len(str(round(scaled)).lstrip("0")), 0)
            return f"{scaled:.{digits}f}{unit}"
    raise AssertionError("the last limit is zero")


def _sizes(family: Architecture, hyper: Hyper, config: Mapping[str, Any], warnings: list[str]) -> dict[str, Meta]:
    keys, lost = family.hyper.to_metadata(hyper)
    warnings += lost
    window = None if "window" in hyper.more else config.get("sliding_window")
    if isinstance(window, int) and window < hyper.context and config.get("use_sliding_window", True):
        warnings.append(f"sliding_window {window} cannot be stored: runtimes will attend to the whole context")
    return {f"{family.name}.{k}": v for k, v in keys.items()}


# ---------------------------------------------------------------- GGUF -> Hugging Face


def to_hf(
    checkpoint: Checkpoint,
    *,
    dtype: str | None = None,
    quantization_config: Mapping[str, Any] | None = None,
    packed: bool = False,
) -> Translation:
    """Return Hugging Face names and small files (config.json, generation_config.json, tokenizer) of a GGUF checkpoint.

    dtype: of the matrices that will be written, as config.json names it; None: the source's if all are floats of one
    type, else bfloat16. quantization_config: written into config.json. packed: use the names of tensors that another
    tool packs codes into. Unknown architectures keep their tensor names, with a warning. Raises InputError.
    """
    metadata = checkpoint.metadata
    label = metadata.get("general.architecture")
    if not isinstance(label, str):
        raise InputError("general.architecture is missing", file=checkpoint.path, hint="set it with `polyquant edit`")
    family = of_metadata(metadata)
    warnings: list[str] = []
    unknown: list[str] = []
    dropped: dict[str, str] = {}
    constants: dict[str, F32] = {}
    vocab = vocabulary.from_metadata(metadata, file=checkpoint.path)
    embedding = checkpoint.weights.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None and embedding.shape else len(vocab.tokens)
    tied = "output.weight" not in checkpoint.weights
    if family is None:
        unknown.append(
            f"architecture '{printable(label)}' is unknown: tensors keep their GGUF names, "
            "transformers cannot load them"
        )
        tensors = tuple(TensorMap(w.name, (w.name,), w.shape, keep_float=len(w.shape) < 2) for w in checkpoint.values())
        config: dict[str, Any] = {
            "model_type": label,
            "architectures": [],
            "vocab_size": rows,
            **_known(checkpoint, label),
        }
    else:
        hyper = family.hyper.read_metadata(metadata, label, vocab=rows, tied=tied, file=checkpoint.path)
        hyper = replace(hyper, rope=rope_tensors.restored(checkpoint, hyper, dropped, warnings) or hyper.rope)
        tensors = _hf_tensors(checkpoint, family, hyper, unknown, packed=packed)
        config = {
            "architectures": [family.class_name],
            "model_type": family.model_type,
            **family.hyper.to_config(hyper),
            **family.bias_entries(frozenset(checkpoint.weights)),
        }
        constants |= layer_numbers.tensors(checkpoint, family, hyper.layers)
    dtype = dtype or _dtype(checkpoint)
    config |= tokenizer_files.special_ids(vocab) | {"dtype": dtype, "torch_dtype": dtype, "use_cache": True}
    if quantization_config:
        config["quantization_config"] = dict(quantization_config)
    files = {
        "config.json": _json(dict(sorted(config.items()))),
        sampling_defaults.FILE: _json(_generation(vocab, metadata)),
    }
    written, doubts = tokenizer_files.files(vocab)
    if family is not None:
        files |= pooling.to_files(metadata, family.name, hyper)
    if family is not None and family.lacks:
        warnings.append(family.lacks)
    return Translation(
        label,
        tensors,
        files=files | written,
        dropped=dropped,
        constants=constants,
        warnings=(*warnings, *vocab.warnings, *doubts),
        unknown=tuple(unknown),
    )


def _dtype(checkpoint: Checkpoint) -> str:
    kinds = {w.codec.name for w in checkpoint.values() if len(w.shape) > 1}
    return {"f16": "float16", "f32": "float32"}.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _known(checkpoint: Checkpoint, label: str) -> dict[str, Any]:
    """Return the scalar numbers and strings of an unknown architecture's metadata."""
    prefix = f"{label}."
    return {
        k.removeprefix(prefix): v
        for k, v in checkpoint.metadata.items()
        if k.startswith(prefix) and isinstance(v, str | int | float) and (not isinstance(v, float) or math.isfinite(v))
    }


def _hf_tensors(
    checkpoint: Checkpoint, family: Architecture, hyper: Hyper, unknown: list[str], *, packed: bool
) -> tuple[TensorMap, ...]:
    stored = (w for w in checkpoint.values() if w.name not in rope_tensors.NAMES)
    mapped = hf_maps(stored, family, hyper, checkpoint.path, packed=packed)
    targets: set[str] = set()
    for tensor_map in mapped.maps:
        if tensor_map.target in targets:
            raise InputError(
                f"two tensors would become '{tensor_map.target}'", file=checkpoint.path, tensor=tensor_map.origin
            )
        targets.add(tensor_map.target)
    if mapped.strange:
        unknown.append(
            f"{len(mapped.strange)} tensors are not part of architecture '{family.name}' and keep their names "
            f"(first: {printable(mapped.strange[0])})"
        )
    return tuple(mapped.maps)


def usual_tensors(checkpoint: Checkpoint) -> tuple[TensorMap, ...]:
    """Return the transformers tensors of a Hugging Face checkpoint: unchanged, except for an mlx-lm folder
    and for separate experts that transformers fuses.

    Raises InputError for tensors that do not fit the configuration.
    """
    family = of_config(checkpoint.config)
    if family is None or not (mlx_names(checkpoint, family) or first_separate(checkpoint, family)):
        return tuple(TensorMap(w.name, (w.name,), w.shape, keep_float=len(w.shape) < 2) for w in checkpoint.values())
    return tuple(usual_maps(list(checkpoint.values()), family, _hyper(checkpoint, family), checkpoint.path))


def float_config(data: bytes) -> bytes:
    """Remove the quantization entries from a config.json, for a folder of float weights. Raises InputError."""
    config = strict_json.typed(strict_json.parse(data, file="config.json"), dict, "config.json")
    described = ("quantization", "quantization_config", "quantization_bit")
    return _json({k: v for k, v in config.items() if k not in described})


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
