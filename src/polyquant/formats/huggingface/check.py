"""Check a Hugging Face folder: files, headers, index against shards, config against tensors.

Payloads are read only if a finding depends on them (packed scales, a head that should be tied).
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from polyquant.codecs.dtypes import NUMPY, PLAIN
from polyquant.errors import InputError, PolyquantError, UnsupportedError
from polyquant.formats.huggingface.dtypes import bitnet_codec
from polyquant.formats.huggingface.exl3 import METHOD, exl3_codec
from polyquant.formats.huggingface.exl3 import modules as exl3_modules
from polyquant.formats.huggingface.folder import WeightFiles, choose
from polyquant.formats.huggingface.open import Shard, Tensor, check_pair, open, read_small
from polyquant.formats.huggingface.quantized import method_of, with_older_files
from polyquant.storage import folder as folders
from polyquant.storage import safetensors, strict_json, torch_file
from polyquant.storage.locations import located
from polyquant.storage.source import Source, fetch_ahead
from polyquant.types import ArraySpec, Finding, Severity

__all__ = ["check", "check_headers"]

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
_RULES = {
    "size": "HF001", "json": "HF002", "entry": "HF003", "bytes": "HF004", "order": "HF005", "truncated": "HF006",
    "trailing": "HF007", "metadata": "HF009",
}  # fmt: skip
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_SCALES = ("scales", "biases", "weight_scale", "weight_scale_inv", "SCB", "absmax", "nested_absmax", "nested_quant_map",
           "scale", "zero", "_weight_scale")  # fmt: skip
"""Parts of which every entry must be finite."""
_TOKENIZERS = ({"tokenizer.json"}, {"tokenizer.model"}, {"vocab.json", "merges.txt"}, {"vocab.txt"}, {"spiece.model"},
               {"sentencepiece.bpe.model"}, {"tekken.json"})  # fmt: skip


@dataclass(slots=True)
class _Contents:
    """The tensors of the weight files. complete: False if a file could not be read, so that absence proves nothing."""

    tensors: dict[str, tuple[Shard, Tensor]] = field(default_factory=dict)
    complete: bool = True


def check(path: str | os.PathLike[str]) -> Iterator[Finding]:
    """Findings about a folder or one weight file. Raises InputError only if `path` does not exist."""
    return _check(located(path), payload=True)


def check_headers(path: str | os.PathLike[str]) -> Iterator[Finding]:
    """The findings of `check` without payloads, and without those about missing tensors."""
    return _check(located(path), payload=False)


def _check(path: Path, *, payload: bool) -> Iterator[Finding]:
    if not path.is_dir():
        yield from _shard(path, _Contents())
        yield from _undecoded(path, {})
        return
    contents = _Contents()
    config = yield from _config(path)
    yield from _side_files(path)
    yield from _weight_files(path, contents)
    if payload:
        yield from _against_config(contents, config or {})
    yield from _packed(contents, config or {})
    yield from _exl3(contents, config or {})
    try:
        older = with_older_files(path, config or {})
    except InputError as e:
        yield _finding(_code(e, "HF031"), ERROR, e, path)
        return
    if payload:
        yield from _quantized(contents, older)
    if payload:  # before other uses, opening the folder reports it
        yield from _undecoded(path, config or {})


def _finding(code: str, severity: Severity, e: PolyquantError, path: Path, tensor: str | None = None) -> Finding:
    bare = type(e)(e.message, expected=e.expected, found=e.found, hint=e.hint)
    return Finding(code, severity, str(bare), tensor or e.tensor, path.name)  # type: ignore[arg-type]


def _member(folder: Path, name: str) -> Iterator[Finding]:
    """Findings of one directory entry; none if it may be opened."""
    try:
        folders.member(folder, name)
    except InputError as e:
        yield _finding(_code(e, "HF041"), ERROR, e, folder / name)


def _code(e: PolyquantError, otherwise: str) -> str:
    """The code of an error; files outside the folder have special codes."""
    if not isinstance(e, folders.LeavesFolderError):
        return otherwise
    return "HF040" if isinstance(e.file, Path) and e.file.is_symlink() else "HF011"


# ---------------------------------------------------------------- config.json and other small files


def _config(folder: Path) -> Generator[Finding, None, dict[str, Any] | None]:
    try:
        config = folders.read_config(folder)
    except InputError as e:
        yield _finding(_code(e, "HF021"), ERROR, e, folder / "config.json")
        return None
    if config is None:
        yield Finding("HF020", WARNING, "config.json is missing", file=folder.name)
    elif not config.get("model_type") and not config.get("architectures"):
        yield Finding("HF022", WARNING, "neither model_type nor architectures", file="config.json")
    return config


def _side_files(folder: Path) -> Iterator[Finding]:
    names = set(folders.entries(folder))
    if not any(needed <= names for needed in _TOKENIZERS):
        yield Finding("HF030", WARNING, "no tokenizer", file=folder.name)
    for name in folders.SIDE_FILES:
        if name not in names:
            continue
        broken = list(_member(folder, name))
        yield from broken
        if broken or not name.endswith(".json"):
            continue
        limit = strict_json.TOKENIZER if name in ("tokenizer.json", "tekken.json", "vocab.json") else strict_json.OTHER
        try:
            strict_json.typed(strict_json.read(folder / name, limit), dict, name)
        except InputError as e:
            yield _finding("HF031", ERROR, e, folder / name)


# ---------------------------------------------------------------- weight files


def _weight_files(folder: Path, contents: _Contents) -> Iterator[Finding]:
    try:
        chosen = choose(folder)
    except (InputError, UnsupportedError) as e:
        contents.complete = False
        index = e.file if isinstance(e.file, Path) and e.file != folder else None
        yield _finding(_code(e, "HF010" if index else "HF019"), ERROR, e, index or folder)
        return
    for note in chosen.notes:
        yield Finding("HF018", WARNING, note, file=folder.name)
    present = set(folders.entries(folder))
    fetch_ahead((folder / name for name in chosen.names), safetensors.touch_header)
    for name in chosen.names:
        if name not in present:
            contents.complete = False
            yield Finding("HF012", ERROR, "shard is missing", file=name)
            continue
        broken = list(_member(folder, name))
        contents.complete = contents.complete and not broken
        yield from broken or _shard(folder / name, contents, chosen.weight_map)
    for name in sorted(present - set(chosen.names)):
        if name.endswith(".safetensors"):
            yield Finding("HF015", WARNING, "is not in the index and not loaded", file=name)
    if chosen.weight_map is not None and chosen.index is not None:
        yield from _index(chosen, contents)


def _shard(path: Path, contents: _Contents, weight_map: Mapping[str, str] | None = None) -> Iterator[Finding]:
    source = Source(path)
    if torch_file.plausible(source) or (path.suffix == ".bin" and not safetensors.plausible(source)):
        yield Finding("HF051", NOTE, "weights are stored as pickle", file=path.name)
        try:
            shard = Shard(source, torch_file.read_torch(source), {})
        except (InputError, UnsupportedError) as e:
            contents.complete = False
            yield _finding("HF052" if isinstance(e, UnsupportedError) else "HF050", ERROR, e, path)
            return
    else:
        header, breaches = safetensors.survey(source)
        for breach in breaches:
            yield _finding(_RULES[breach.rule], ERROR, breach.error(path), path)
        contents.complete = contents.complete and not breaches
        # After a violation the offsets cannot be trusted, so the file's tensors are ignored.
        shard = Shard(source, {} if breaches else header.entries, header.metadata)
    own_name = path.name
    for name, tensor in shard.tensors.items():
        if tensor.dtype not in PLAIN:
            yield Finding("HF008", WARNING, f"dtype {tensor.dtype} cannot be decoded", name, own_name)
        if weight_map is not None and weight_map.get(name) != own_name:
            where = f"weight_map assigns it to {weight_map[name]}" if name in weight_map else "is not in weight_map"
            yield Finding("HF014", WARNING, where, name, own_name)
            if name in weight_map:
                continue
        contents.tensors[name] = (shard, tensor)


def _index(chosen: WeightFiles, contents: _Contents) -> Iterator[Finding]:
    if not contents.complete:
        return
    for tensor, name in (chosen.weight_map or {}).items():
        if tensor not in contents.tensors:
            yield Finding("HF013", ERROR, f"is not in {name}", tensor, chosen.index)
    total = sum(t.nbytes for name, (_, t) in contents.tensors.items() if name in (chosen.weight_map or {}))
    stated = chosen.total_size  # some torch tools write a float
    if stated is not None and stated != total:
        yield Finding(
            "HF016", WARNING, f"total_size is {str(stated)[:40]}, the tensors have {total}", file=chosen.index
        )


# ---------------------------------------------------------------- tensors against config


def _against_config(contents: _Contents, config: Mapping[str, Any]) -> Iterator[Finding]:
    tensors = contents.tensors
    if not tensors or _EMBEDDING not in tensors:
        return
    embedding = tensors[_EMBEDDING][1]
    tied = config.get("tie_word_embeddings")
    if tied is True and _HEAD in tensors:
        same = _same(tensors[_HEAD], tensors[_EMBEDDING])
        what = (
            "equals the embedding, which wastes space"
            if same
            else "differs from the embedding, which loaders use instead"
        )
        yield Finding("HF023", NOTE if same else WARNING, f"the output head is tied but also stored, and {what}", _HEAD)
    if tied is False and _HEAD not in tensors and contents.complete:
        yield Finding("HF024", ERROR, "the output head is neither tied nor stored", _HEAD)
    layers = config.get("num_hidden_layers")
    numbers = {int(m[1]) for name in tensors if (m := _LAYER.match(name)) and len(m[1]) < 7}
    if isinstance(layers, int) and contents.complete and 0 <= layers < 10**6:
        missing = sorted(set(range(layers)) - numbers)
        if missing:
            yield Finding("HF025", ERROR, f"{len(missing)} of {layers} layers have no tensor, first {missing[0]}")
        if numbers and max(numbers) >= layers:
            yield Finding("HF025", WARNING, f"layer {max(numbers)} exists, but config.json declares {layers} layers")
    for axis, key in enumerate(("vocab_size", "hidden_size")):
        size = config.get(key)
        if axis and embedding.dtype not in ("F64", "F32", "F16", "BF16"):
            continue  # words of packed codes
        if isinstance(size, int) and len(embedding.shape) == 2 and embedding.shape[axis] != size:
            yield Finding("HF025", WARNING, f"{key} is {size}, the embedding is {list(embedding.shape)}", _EMBEDDING)


def _same(a: tuple[Shard, Tensor], b: tuple[Shard, Tensor]) -> bool:
    """True for equal bytes, compared one megabyte at a time."""
    (shard_a, one), (shard_b, two) = a, b
    if (one.dtype, one.shape, one.nbytes) != (two.dtype, two.shape, two.nbytes):
        return False
    rows = one.shape[0] if one.shape else 1
    if not one.nbytes:
        return True
    spec = ArraySpec((rows, one.nbytes // rows), np.dtype(np.uint8))
    left, right = one.array(shard_a.source, spec), two.array(shard_b.source, spec)
    step = max(1, (1 << 20) // spec.shape[1])
    return all(np.array_equal(left.read(i, i + step), right.read(i, i + step)) for i in range(0, rows, step))


def _exl3(contents: _Contents, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about EXL3 weights with missing or inconsistent tensors."""
    quantization = config.get("quantization_config")
    declared = isinstance(quantization, dict) and quantization.get("quant_method") == METHOD
    described = {name: tensor for name, (_, tensor) in contents.tensors.items()}
    for module in exl3_modules(described):
        if not contents.complete or not (declared or (f"{module}.suh" in described and f"{module}.svh" in described)):
            continue
        try:
            exl3_codec(module, described)
        except InputError as e:
            yield _finding("HF062", ERROR, e, contents.tensors[f"{module}.trellis"][0].source.path, module)


def _quantized(contents: _Contents, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about quantized weights with missing or inconsistent tensors, and about non-finite scales."""
    method = method_of(config)
    if method is None or not contents.complete:
        return
    described = {name: tensor for name, (_, tensor) in contents.tensors.items()}
    modules = list(method[0].modules(described))
    if not modules:
        yield Finding(
            "HF061",
            WARNING,
            "config.json names a quantization method that no weight uses",
            file="config.json",
        )
    for module in modules:
        try:
            weight = method[0].weight_of(module, described, method[1], partial(read_small, contents.tensors))
        except InputError as e:
            home = next(
                shard for name, (shard, _) in contents.tensors.items() if name.startswith((f"{module}.", f"{module}_"))
            )
            yield _finding("HF063", ERROR, e, home.source.path, module)
            continue
        if isinstance(weight, str):
            continue
        for name in (weight.tensors[p] for p in _SCALES if p in weight.tensors):
            shard = contents.tensors[name][0]
            if np.isfinite(read_small(contents.tensors, name).astype(np.float32)).all():
                continue
            yield Finding(
                "HF064",
                ERROR,
                f"{'biases' if name.endswith('.biases') else 'scales'} contain NaN or infinity",
                module,
                shard.source.path.name,
            )


def _undecoded(path: Path, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings for weights of an unsupported scheme. Errors of `open` were reported before, and HF060 covers BitNet."""
    try:
        reason = open(path).undecoded
    except (InputError, UnsupportedError):
        return
    if reason is not None and (reason.code != "HF065" or bitnet_codec(config) is None):
        yield _finding(reason.code, ERROR, reason.error(), reason.file, reason.tensor)


def _packed(contents: _Contents, config: Mapping[str, Any]) -> Iterator[Finding]:
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "bitnet":
        return
    for name, (_, tensor) in contents.tensors.items():
        if tensor.dtype != "U8" or not name.endswith(".weight"):
            continue
        scale = contents.tensors.get(f"{name}_scale")
        if scale is None:
            if contents.complete:
                yield Finding("HF060", ERROR, "packed weight has no weight_scale", name)
        elif (wrong := check_pair(tensor, scale[1])) is not None:
            yield Finding("HF060", ERROR, wrong, name)
        else:
            shard, one = scale
            value = float(one.array(shard.source, ArraySpec((1,), NUMPY[one.dtype])).read(0, 1)[0])
            if not np.isfinite(value) or value == 0:
                yield Finding("HF060", ERROR, f"weight_scale is {value}", name)
