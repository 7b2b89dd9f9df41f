"""Open Hugging Face folders and single weight files; reads headers only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from polyquant.codecs.dtypes import NUMPY, codec_of
from polyquant.codecs.undecoded_dtype import UndecodedDtype
from polyquant.errors import InputError, printable
from polyquant.formats.huggingface.dtypes import bitnet_codec
from polyquant.formats.huggingface.exl3 import METHOD, exl3_codec, modules, weight_name
from polyquant.formats.huggingface.folder import PICKLE, SAFETENSORS, WeightFiles, choose
from polyquant.formats.huggingface.quantized import Method, method_of, with_older_files
from polyquant.formats.huggingface.undecoded import find_undecoded
from polyquant.rows import in_memory
from polyquant.storage import folder as folders
from polyquant.storage import safetensors, torch_file
from polyquant.storage.locations import located
from polyquant.storage.source import Source, fetch_ahead
from polyquant.types import ArraySpec, Checkpoint, Codec, Evidence, Shape, StoredArray, Undecoded, Weight

__all__ = ["Shard", "Tensor", "check_pair", "open", "read_shard", "read_small", "sniff"]

_WEIGHTS = tuple(f"{name}{index}" for name in (SAFETENSORS, PICKLE) for index in ("", ".index.json"))


class Tensor(Protocol):
    """Header data of a tensor in either kind of weight file."""

    @property
    def dtype(self) -> str:
        """The dtype's name in safetensors."""

    @property
    def shape(self) -> Shape:
        """The shape, row-major."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""

    def array(self, source: Source, spec: ArraySpec) -> StoredArray:
        """The bytes as an array of `spec`."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One weight file with its header read."""

    source: Source
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def sniff(path: str | os.PathLike[str]) -> Evidence | None:
    """Evidence that this is a Hugging Face folder or one of its weight files, by content; None if not."""
    path = located(path)
    if path.is_dir():
        names = folders.entries(path)
        for name in _WEIGHTS:
            if name in names:
                return Evidence("hf", f"folder with {name}")
        if "config.json" in names and any(n.endswith(".safetensors") for n in names):
            return Evidence("hf", "folder with config.json and safetensors files")
    elif path.is_file():
        source = Source(path)
        if safetensors.plausible(source):
            return Evidence("hf", "a safetensors file: header size and JSON object")
        if torch_file.plausible(source):
            return Evidence("hf", "a torch file: a zip that starts with data.pkl, or torch's old magic number")
    return None


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a folder, or one .safetensors or .bin file. Reads headers only. Raises InputError, UnsupportedError."""
    path = located(path)
    if not path.is_dir():
        shard = read_shard(path)
        read = _weights({name: (shard, t) for name, t in shard.tensors.items()}, {}, None)
        notes = ("single file; config.json was not read", *read.notes)
        return Checkpoint("hf", path, read.weights, shard.metadata, notes=notes, undecoded=read.undecoded)
    config = folders.read_config(path)
    notes = () if config is not None else ("config.json is missing",)
    chosen = choose(path)
    tensors, metadata, more = _gather(path, chosen)
    config = with_older_files(path, config) if config is not None else None
    read = _weights(tensors, config or {}, path)
    files = {name: file for name in folders.SIDE_FILES if (file := folders.member(path, name)) is not None}
    files |= folders.pooling_files(path)
    notes += chosen.notes + more + read.notes
    return Checkpoint("hf", path, read.weights, metadata, config or {}, files, notes=notes, undecoded=read.undecoded)


def read_shard(path: Path) -> Shard:
    """The header of one weight file, detected by content, not by name. Raises InputError, UnsupportedError."""
    source = Source(path)
    if torch_file.plausible(source) or (path.suffix == ".bin" and not safetensors.plausible(source)):
        return Shard(source, torch_file.read_torch(source), {})
    header = safetensors.read_header(source)
    return Shard(source, header.entries, header.metadata)


def _gather(
    folder: Path, chosen: WeightFiles
) -> tuple[dict[str, tuple[Shard, Tensor]], Mapping[str, str], tuple[str, ...]]:
    """Tensors of all shards as the index assigns them, and unlisted ones with a note."""
    tensors: dict[str, tuple[Shard, Tensor]] = {}
    metadata: Mapping[str, str] = {}
    unlisted = []
    fetch_ahead((folder / name for name in chosen.names), safetensors.touch_header)
    for name in chosen.names:
        path = folders.member(folder, name)
        if path is None:
            raise InputError("shard is missing", file=folder / name, hint="finish the download")
        shard = read_shard(path)
        metadata = metadata or shard.metadata
        for tensor, entry in shard.tensors.items():
            home = name if chosen.weight_map is None else chosen.weight_map.get(tensor)
            if home is None:
                unlisted.append(tensor)
            elif home != name:
                continue
            if tensor in tensors:
                raise InputError("tensor is in two shards", file=path, tensor=tensor)
            tensors[tensor] = (shard, entry)
    for tensor, name in (chosen.weight_map or {}).items():
        if tensor not in tensors:
            raise InputError("tensor is not in the shard named by the index", file=folder / name, tensor=tensor)
    notes: tuple[str, ...] = ()
    if unlisted:
        notes = (f"{len(unlisted)} tensors are not in the weight_map, e.g. {printable(unlisted[0])}",)
    return tensors, metadata, notes


@dataclass(frozen=True, slots=True)
class _Read:
    """The weights made from the tensors."""

    weights: Mapping[str, Weight]
    notes: tuple[str, ...]
    undecoded: Undecoded | None


def _weights(tensors: Mapping[str, tuple[Shard, Tensor]], config: Mapping[str, Any], folder: Path | None) -> _Read:
    """Make weights from the tensors. folder: None for a single file."""
    packed, notes, left = bitnet_codec(config), list[str](), list[tuple[str, str]]()
    out: dict[str, Weight] = {}
    taken = _exl3(tensors, config, out)
    if (reader := method_of(config)) is not None:
        taken |= _quantized(tensors, *reader, out, notes, left)
    if packed is not None:
        taken |= _bitnet(tensors, packed, out)
    described = {name: tensor for name, (_, tensor) in tensors.items()}
    undecoded, codes = find_undecoded(lambda n: tensors[n][0].source.path, described, taken, left, config, folder)
    if undecoded is not None:
        notes.append(
            f"unsupported quantization scheme: {printable(undecoded.scheme)}; its tensors are shown in their stored "
            "layout"
        )
    known: dict[tuple[str, Shape, int], tuple[Codec, dict[str, ArraySpec]]] = {}
    for name, (shard, tensor) in tensors.items():
        if name in taken:
            continue
        if undecoded is not None and name in codes:
            codec: Codec = UndecodedDtype(-1, tensor.nbytes, undecoded.scheme, tensor.dtype)
            specs = codec.specs(tensor.shape)
        else:
            kind = (tensor.dtype, tensor.shape, tensor.nbytes)  # many experts have the same kind
            if kind not in known:
                codec = codec_of(tensor.dtype, tensor.nbytes)
                known[kind] = codec, codec.specs(tensor.shape)
            codec, specs = known[kind]
        arrays = {part: tensor.array(shard.source, spec) for part, spec in specs.items()}
        out[name] = Weight(name, tensor.shape, codec, arrays)
    ordered = {n: out[n] for n in dict.fromkeys(taken.get(n, n) for n in tensors) if n in out} if taken else out
    return _Read(ordered, tuple(notes), undecoded)


def _bitnet(tensors: Mapping[str, tuple[Shard, Tensor]], packed: Codec, out: dict[str, Weight]) -> dict[str, str]:
    """Add packed BitNet weights to `out`; returns the tensors they consist of. Raises InputError for a scale that does
    not fit.
    """
    taken: dict[str, str] = {}
    for name, (shard, tensor) in tensors.items():
        if tensor.dtype == "U8" and name.endswith(".weight") and f"{name}_scale" in tensors:
            out[name] = _pair(name, (shard, tensor), tensors[f"{name}_scale"], packed)
            taken |= {name: name, f"{name}_scale": name}
    return taken


def _exl3(
    tensors: Mapping[str, tuple[Shard, Tensor]], config: Mapping[str, Any], out: dict[str, Weight]
) -> dict[str, str]:
    """Add EXL3 weights to `out`; returns the tensors they consist of. Raises InputError for incomplete ones."""
    taken: dict[str, str] = {}
    if not (exl3_modules := modules(tensors)):
        return taken
    described = {name: tensor for name, (_, tensor) in tensors.items()}
    for module in exl3_modules:
        if _method(config) != METHOD and not (f"{module}.suh" in tensors and f"{module}.svh" in tensors):
            continue
        shard = tensors[f"{module}.trellis"][0]
        try:
            codec, shape = exl3_codec(module, described)
        except InputError as e:
            raise InputError(
                e.message, file=shard.source.path, tensor=module, expected=e.expected, found=e.found
            ) from None
        arrays = {}
        for part, spec in codec.specs(shape).items():
            home, tensor = tensors[f"{module}.{part}"]
            arrays[part] = tensor.array(home.source, spec)
            taken[f"{module}.{part}"] = weight_name(module)
        name = weight_name(module)
        if name in tensors:
            raise InputError("is stored both as EXL3 and plain", file=shard.source.path, tensor=name)
        out[name] = Weight(name, shape, codec, arrays)
    return taken


def _quantized(
    tensors: Mapping[str, tuple[Shard, Tensor]],
    method: Method,
    settings: Mapping[str, Any],
    out: dict[str, Weight],
    notes: list[str],
    left: list[tuple[str, str]],
) -> dict[str, str]:
    """Add weights of another tool's method to `out`; returns the tensors they consist of.

    left: receives modules with an unsupported scheme, and its name. Raises InputError for incomplete weights.
    """
    described = {name: tensor for name, (_, tensor) in tensors.items()}
    taken: dict[str, str] = {}
    lost: list[str] = []
    for module in method.modules(described):
        try:
            weight = method.weight_of(module, described, settings, partial(read_small, tensors))
        except InputError as e:
            home = next(shard for name, (shard, _) in tensors.items() if name.startswith((f"{module}.", f"{module}_")))
            raise InputError(
                e.message, file=home.source.path, tensor=module, expected=e.expected, found=e.found, hint=e.hint
            ) from None
        if isinstance(weight, str):
            left.append((module, weight))
            continue
        arrays: dict[str, StoredArray] = {}
        for part, spec in weight.codec.specs(weight.shape).items():
            if part in weight.tensors:
                shard, tensor = tensors[weight.tensors[part]]
                arrays[part] = tensor.array(shard.source, spec)
        arrays |= in_memory(weight.held)
        lost += weight.lost
        taken |= dict.fromkeys((*weight.tensors.values(), *weight.spare), weight.name)
        if weight.name in tensors and weight.name not in weight.tensors.values():
            raise InputError("is stored both quantized and plain", file=shard.source.path, tensor=weight.name)
        out[weight.name] = Weight(weight.name, weight.shape, weight.codec, arrays)
    if not taken and not left:
        notes.append(
            f"config.json declares '{printable(str(settings.get('quant_method', 'quantization_bit')), 40)}', but no "
            "weight uses it"
        )
    if lost:
        notes.append(f"{len(lost)} static input scales are omitted, e.g. {printable(lost[0])}")
    return taken


def read_small(tensors: Mapping[str, tuple[Shard, Tensor]], name: str) -> NDArray[Any]:
    """Read a small tensor (group indices, a shape, scales); a scalar as a vector of one."""
    shard, tensor = tensors[name]
    shape = tensor.shape or (1,)
    return tensor.array(shard.source, ArraySpec(shape, NUMPY[tensor.dtype])).read(0, shape[0])


def _method(config: Mapping[str, Any]) -> object:
    quantization = config.get("quantization_config")
    return quantization.get("quant_method") if isinstance(quantization, dict) else None


def check_pair(weight: Tensor, scale: Tensor) -> str | None:
    """The problem with a packed BitNet weight and its scale; None if they are valid."""
    if len(weight.shape) != 2:
        return f"packed weight must be [R / 4, C], found {list(weight.shape)}"
    if scale.dtype not in ("BF16", "F16", "F32") or scale.shape not in ((), (1,)):
        return f"weight_scale must be one float, found {scale.dtype} {list(scale.shape)}"
    return None


def _pair(name: str, weight: tuple[Shard, Tensor], scale: tuple[Shard, Tensor], codec: Codec) -> Weight:
    (shard, packed), (scale_shard, one) = weight, scale
    wrong = check_pair(packed, one)
    if wrong is not None:
        raise InputError(wrong, file=shard.source.path, tensor=name)
    quarter, columns = packed.shape
    arrays = {
        "weight": packed.array(shard.source, ArraySpec(packed.shape, NUMPY["U8"])),
        "weight_scale": one.array(scale_shard.source, ArraySpec((1,), NUMPY[one.dtype])),
    }
    return Weight(name, (4 * quarter, columns), codec, arrays)
