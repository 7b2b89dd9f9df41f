"""A checkpoint said in another format's words: names, row order, metadata, tokenizer.

    to_gguf: Hugging Face -> GGUF, in the order and with the value types of llama.cpp's converter
    to_hf:   GGUF -> Hugging Face, its inverse

Nothing is read but headers, configuration and tokenizer (and the few numbers of RoPE's divisors and of activations). `general.file_type` is left to
the caller, who knows the codecs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyquant.architectures import layer_numbers, pooling, rope_tensors
from polyquant.architectures.find import by_name, known, of_config, of_metadata
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.mlx import mlx_names
from polyquant.architectures.record import Architecture
from polyquant.architectures.tensors import gguf_maps, hf_maps, is_float_tensor, usual_maps
from polyquant.errors import InputError, PlanError, UnknownNameError, UnsupportedError, printable
from polyquant.gguf_values import string, u32
from polyquant.storage import strict_json
from polyquant.storage.folder import MODULES
from polyquant.tokenizers import reading as tokenizer
from polyquant.tokenizers import vocabulary
from polyquant.tokenizers import writing as tokenizer_files
from polyquant.types import F32, Checkpoint, Meta, Shape, TensorMap, Translation, Weight

__all__ = ["float_config", "mismatches", "to_gguf", "to_hf", "usual_tensors"]

_FLOAT_CODECS = frozenset({"f32", "f16", "bf16", "f64"})
_COMPUTED = re.compile(r".*(\.rotary_(pos_)?emb\.inv_freq|\.attention\.(masked_)?bias)")


# ---------------------------------------------------------------- Hugging Face -> GGUF


def to_gguf(
    checkpoint: Checkpoint,
    *,
    architecture: str | None = None,
    with_tokenizer: bool = True,
    name: str | None = None,
    pre: str | None = None,
) -> Translation:
    """GGUF names and metadata of a Hugging Face checkpoint.

    architecture: another of our GGUF architectures than the usual one (`bitnet` for llama.cpp's BitNet). name: general.name, else made
    from the folder's. pre: llama.cpp's name of the pre-tokenizer, else found by what it does. Unknown architectures keep their tensor
    names, with a warning. Raises InputError, UnknownNameError, PlanError, UnsupportedError.
    """
    config = checkpoint.config
    family = of_config(config)
    if architecture is not None:
        asked = by_name(architecture)
        if asked is None:
            raise UnknownNameError("architecture", architecture, known())
        if family is not None and asked.name != family.name and asked.model_type != family.model_type:
            raise PlanError(
                f"a model of type '{family.model_type}' cannot become architecture '{architecture}'",
                file=checkpoint.path,
            )
        family = family if family is not None and asked.name == family.name else asked
    warnings: list[str] = []
    unknown: list[str] = []
    dropped: dict[str, str] = {}
    constants: dict[str, F32] = {}
    hyper = None
    label = family.name if family else str(config.get("model_type") or "unknown")
    if family is None:
        unknown.append(
            f"architecture '{printable(label)}' is unknown: tensors keep their own names and no hyper-parameters are written; "
            "llama.cpp will not run this file"
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
        found = tokenizer.from_files(checkpoint.files, config, rows=rows, pre=pre)
        metadata |= found.metadata()
        warnings += found.warnings
        if found.prefix:
            words = " ".join(found.tokens[i] for i in found.prefix)
            warnings.append(f"GGUF cannot say that every text begins with {words}: put them in front yourself")
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
    """What an embedding model says of it; a decoder whose pooling GGUF cannot say is still a decoder."""
    if not family.encoder and MODULES not in checkpoint.files:
        return {}
    try:
        return pooling.to_metadata(checkpoint.files, family.name, hyper)
    except UnsupportedError as problem:
        if family.encoder:
            raise
        warnings.append(f"{problem.message}: the GGUF file does not say how vectors of texts are made")
        return {}


def _hyper(checkpoint: Checkpoint, family: Architecture) -> Hyper:
    usual = family.names.to_hf("token_embd.weight")
    spelled = (
        usual
        if usual in checkpoint
        else next(  # those of a bare decoder lack the root
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
    for made in mapped.maps:
        if made.target in out:
            raise InputError(
                f"two tensors would become '{made.target}'", file=checkpoint.path, tensor=made.sources[0], found=out[made.target].origin
            )  # fmt: skip
        stem = made.target.split(".")[2] if made.target.startswith("blk.") else ""
        ternary = trained_ternary and stem in family.linears and made.target.endswith(".weight")
        out[made.target] = replace(
            made,
            ternarize=ternary and checkpoint[made.sources[0]].codec.name in _FLOAT_CODECS,
            keep_float=is_float_tensor(made.target, made.shape),
        )
    if mapped.strange:
        unknown.append(
            f"{len(mapped.strange)} tensors are not part of architecture '{family.name}' and keep their names "
            f"(first: {printable(mapped.strange[0])}); llama.cpp may refuse the file"
        )
    _complain_of_missing(set(out), family, hyper, unknown)
    return tuple(out.values())


def _stored(checkpoint: Checkpoint, family: Architecture, hyper: Hyper, dropped: dict[str, str]) -> Iterator[Weight]:
    """The tensors that GGUF stores; the others go to `dropped`, with a reason."""
    for weight in checkpoint.values():
        if _COMPUTED.fullmatch(weight.name):
            dropped[weight.name] = "computed from the configuration, not a weight"
        elif (number := layer_numbers.find(weight.name, family)) is not None:
            dropped[weight.name] = f"said by {number.key}"
        elif hyper.tied and family.names.to_gguf(weight.name) == "output.weight":
            dropped[weight.name] = "tie_word_embeddings: the head is the embedding"
        elif (reason := family.left_out(weight.name, hyper.layers)) is not None:
            dropped[weight.name] = reason
        else:
            yield weight


def _complain_of_missing(targets: set[str], family: Architecture, hyper: Hyper, unknown: list[str]) -> None:
    if missing := _missing(targets, family, hyper):
        unknown.append(f"{len(missing)} tensors that the configuration promises are not there (first: {missing[0]})")


def _missing(targets: set[str], family: Architecture, hyper: Hyper) -> list[str]:
    """GGUF names of matrices that the configuration promises."""
    whole = set(family.names.top.values()) & {
        "token_embd",
        "output_norm",
        *(("output",) if hyper.tied is False else ()),
    }
    needed = [f"{stem}.weight" for stem in sorted(whole)]
    for i in range(hyper.layers):
        stems = family.linears & family.layer.shapes(hyper, i).keys()
        needed += [f"blk.{i}.{stem}.weight" for stem in sorted(stems)]
    return [n for n in needed if n not in targets]


def mismatches(checkpoint: Checkpoint) -> Iterator[tuple[str | None, str]]:
    """(tensor, what is wrong) where the tensors of a Hugging Face checkpoint contradict its config.json. Nothing for an unknown architecture."""
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
        yield behind[0].sources[0], f"belongs to a layer behind the last: there are {hyper.layers}{_more(behind)}"
    wanted: dict[str, Shape] = {
        "token_embd.weight": (hyper.vocab, hyper.hidden),
        "output.weight": (hyper.vocab, hyper.hidden),
    }
    for i in range(hyper.layers):
        wanted |= {f"blk.{i}.{stem}.weight": shape for stem, shape in family.layer.shapes(hyper, i).items()}
    off = [m for m in mapped.maps if m.target in wanted and _squeezed(m.shape) != _squeezed(wanted[m.target])]
    if off:
        first = off[0]
        what = f"is {list(first.shape)}, the configuration asks for {list(wanted[first.target])}"
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
    }


def _title(checkpoint: Checkpoint) -> str:
    """The model's name: from the configuration, the hub's cache layout, or the folder."""
    said = checkpoint.config.get("_name_or_path")
    parts = checkpoint.path.absolute().parts
    cached = next((p for p in reversed(parts) if p.startswith("models--")), None)
    if isinstance(said, str) and said.strip("/. "):
        stem = said.rstrip("/").rpartition("/")[2]
    elif cached:
        stem = cached.rpartition("--")[2]
    else:
        names = [p for p in parts if p not in ("hf", "/")]
        stem = names[-1] if names else "model"
    words = stem.replace("_", "-").split("-")
    # As the converter does: a word in lower case gets a capital, "7B" and "v0.3" stay.
    return " ".join(w.title() if w.islower() and not re.match(r"v?\d", w) else w for w in words if w) or "model"


def _size_label(shapes: Mapping[str, Shape]) -> str:
    """1.0M; of experts "8x1.0M": their number, then the weights of one of them with all that is shared."""
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
    """1,048,000 -> 1.0M: at least two digits."""
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
        warnings.append(f"sliding_window {window} has no counterpart here: runtimes will attend to the whole context")
    return {f"{family.name}.{k}": v for k, v in keys.items()}


# ---------------------------------------------------------------- GGUF -> Hugging Face


def to_hf(
    checkpoint: Checkpoint,
    *,
    dtype: str | None = None,
    quantization_config: Mapping[str, Any] | None = None,
    packed: bool = False,
) -> Translation:
    """Hugging Face names and the small files (config.json, generation_config.json, tokenizer) of a GGUF checkpoint.

    dtype: of the matrices that will be written, as config.json calls it; None: the source's if they are floats of one type, else
    bfloat16. quantization_config: goes into config.json. packed: weights may have the names of tensors that another tool packs their codes into. Unknown
    architectures keep their tensor names, with a warning. Raises InputError.
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
    words = vocabulary.from_metadata(metadata, file=checkpoint.path)
    embedding = checkpoint.weights.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None and embedding.shape else len(words.tokens)
    tied = "output.weight" not in checkpoint.weights
    if family is None:
        unknown.append(
            f"architecture '{printable(label)}' is unknown: tensors keep their GGUF names, transformers will not load them"
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
    config |= tokenizer_files.special_ids(words) | {"dtype": dtype, "torch_dtype": dtype, "use_cache": True}
    if quantization_config:
        config["quantization_config"] = dict(quantization_config)
    files = {
        "config.json": _json(dict(sorted(config.items()))),
        "generation_config.json": _json(tokenizer_files.generation_config(words)),
    }
    written, doubts = tokenizer_files.files(words)
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
        warnings=(*warnings, *words.warnings, *doubts),
        unknown=tuple(unknown),
    )


def _dtype(checkpoint: Checkpoint) -> str:
    kinds = {w.codec.name for w in checkpoint.values() if len(w.shape) > 1}
    return {"f16": "float16", "f32": "float32"}.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _known(checkpoint: Checkpoint, label: str) -> dict[str, Any]:
    """What can be said of an architecture that is not ours: its plain numbers and strings."""
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
    seen: set[str] = set()
    for made in mapped.maps:
        if made.target in seen:
            raise InputError(f"two tensors would become '{made.target}'", file=checkpoint.path, tensor=made.origin)
        seen.add(made.target)
    if mapped.strange:
        unknown.append(
            f"{len(mapped.strange)} tensors are not part of architecture '{family.name}' and keep their names "
            f"(first: {printable(mapped.strange[0])})"
        )
    return tuple(mapped.maps)


def usual_tensors(checkpoint: Checkpoint) -> tuple[TensorMap, ...]:
    """The tensors of a checkpoint with Hugging Face's names as transformers names them: as they are, but for a folder of mlx-lm.

    Raises InputError for tensors that do not fit the configuration.
    """
    family = of_config(checkpoint.config)
    if family is None or not mlx_names(checkpoint, family):
        return tuple(TensorMap(w.name, (w.name,), w.shape, keep_float=len(w.shape) < 2) for w in checkpoint.values())
    return tuple(usual_maps(list(checkpoint.values()), family, _hyper(checkpoint, family), checkpoint.path))


def float_config(data: bytes) -> bytes:
    """A config.json without what it says of quantized weights, for a folder that holds their floats. Raises InputError."""
    config = strict_json.typed(strict_json.parse(data, file="config.json"), dict, "config.json")
    return _json({k: v for k, v in config.items() if k not in ("quantization_config", "quantization_bit")})


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
