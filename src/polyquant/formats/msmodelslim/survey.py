"""Read a folder as far as possible: files, headers, description, the codec of every layer, and all violations found.

`open` raises the first one that stops it; `check` reports all; `repair` starts from here. Headers and JSON only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import InputError, PolyquantError
from polyquant.formats.breach import Breach, breach_of
from polyquant.formats.msmodelslim import description as descriptions
from polyquant.formats.msmodelslim import folder as folders
from polyquant.formats.msmodelslim.description import CACHE_PARTS, FLOAT, KINDS, PARTS, Description, split
from polyquant.formats.msmodelslim.folder import MsModelSlimFiles
from polyquant.formats.msmodelslim.infer import Facts, codec_for
from polyquant.formats.stored import Stored
from polyquant.storage import safetensors
from polyquant.storage.folder import member, read_config
from polyquant.storage.source import Source, fetch_ahead
from polyquant.types import Shape

__all__ = ["Linear", "Stored", "Survey", "survey"]

_INTEGERS = ("I8", "U8", "I32", "I64")
_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "half": "F16", "float": "F32"}


@dataclass(frozen=True, slots=True)
class Linear:
    """A quantized layer. parts: the parts of its codec."""

    name: str
    codec: MsModelSlim
    shape: Shape
    parts: Mapping[str, Stored]


@dataclass(slots=True)
class Survey:
    """The contents of a folder. complete: False if a file could not be read, so that absence proves nothing.

    linears: quantized layers by name, without ".weight"; plain: all other tensors; undescribed, absent: tensors without
    a type, and types without a tensor; unknown: unknown types -> their tensors; mislabelled: floats described as
    quantized.
    """

    path: Path
    files: MsModelSlimFiles = field(default_factory=lambda: MsModelSlimFiles("", ()))
    description: Description = field(default_factory=Description)
    described: bool = False
    config: dict[str, Any] | None = None
    tensors: dict[str, Stored] = field(default_factory=dict)
    linears: dict[str, Linear] = field(default_factory=dict)
    plain: dict[str, Stored] = field(default_factory=dict)
    breaches: list[Breach] = field(default_factory=list)
    complete: bool = True
    undescribed: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    unknown: dict[str, list[str]] = field(default_factory=dict)
    mislabelled: list[str] = field(default_factory=list)
    strays: list[tuple[str, Path]] = field(default_factory=list)

    def refused(self, error: PolyquantError, code: str, file: Path, tensor: str | None = None) -> None:
        """Record an error."""
        self.breaches.append(breach_of(error, code, file, tensor, leaves="ASC006"))

    def broken(self, error: PolyquantError, code: str, file: Path) -> None:
        """Record weight files that could not be read."""
        self.complete = False
        self.refused(error, code, file)

    def word(self, tensor: str) -> str | None:
        """The type of a tensor; None if the description has none."""
        word = self.description.types.get(tensor)
        if word is None and isinstance(self.description.general.get(tensor), str):  # a tensor name without a dot
            return str(self.description.general[tensor])
        return word

    @property
    def dialect(self) -> tuple[str, str]:
        """(dialect, reason)."""
        general = self.description.general
        if "metadata" in general and "optional" in general:
            return "v1", "the description has metadata and optional"
        if self.files.stem.startswith("quant_model_weights"):
            return "v1", f"the weights are named {self.files.stem}"
        if "version" in general:
            return "ascendv1", f"the description has version {str(general['version'])[:20]}"
        return "v0", "the description has no version"

    @property
    def model_dtype(self) -> tuple[str, str] | None:
        """(dtype of the float model in safetensors' notation, its source): config.json, else the embedding or the first
        float matrix.
        """
        for place in self._places():
            dtype = place.get("torch_dtype") or place.get("dtype")
            if isinstance(dtype, str) and dtype.removeprefix("torch.") in _DTYPES:
                return _DTYPES[dtype.removeprefix("torch.")], "config.json"
        floats = [n for n, s in self.plain.items() if s.entry.dtype in _DTYPES.values() and len(s.entry.shape) == 2]
        if not floats:
            return None
        name = next((n for n in floats if "embed" in n), floats[0])
        return self.plain[name].entry.dtype, name

    def size(self, key: str) -> int | None:
        """A positive integer of config.json."""
        for place in self._places():
            value = place.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None

    def _places(self) -> list[dict[str, Any]]:
        """config.json, and its objects about the language model."""
        config = self.config or {}
        return [config, *(inner for key in ("text_config", "llm_config") if isinstance(inner := config.get(key), dict))]


def survey(path: Path, *, indexed: bool = True) -> Survey:
    """Survey a folder. indexed: trust the index instead of the names of the shards."""
    out = Survey(path)
    try:
        out.config = read_config(path)
    except PolyquantError as e:
        out.refused(e, "ASC002", path / "config.json")
    try:
        out.files = folders.choose(path, indexed=indexed)
    except PolyquantError as e:
        about_json = isinstance(e.file, Path) and e.file.suffix == ".json"
        out.broken(e, "ASC005" if about_json else "ASC004", path)
        return out
    _describe(out)
    fetch_ahead((path / name for name in out.files.names), safetensors.touch_header)
    for name in out.files.names:
        _shard(out, name)
    _index(out)
    _group(out)
    return out


def _describe(out: Survey) -> None:
    name = out.files.description
    if name is None:
        missing = InputError("there is no quant_model_description.json", hint="polyquant repair writes one")
        out.refused(missing, "ASC010", out.path)
        return
    try:
        file = member(out.path, name)
        assert file is not None
        out.description = descriptions.read(file)
        out.described = True
    except PolyquantError as e:
        out.refused(e, "ASC011", out.path / name)


def _shard(out: Survey, name: str) -> None:
    path = out.path / name
    try:
        file = member(out.path, name)
        if file is None:
            raise InputError("shard is missing", file=path, hint="finish the download")
        source = Source(file)
    except PolyquantError as e:
        out.broken(e, "ASC007", path)
        return
    header, breaches = safetensors.survey(source)
    if breaches:  # after a violation the offsets cannot be trusted, so the file's tensors are ignored
        out.complete = False
        hint = "the file is truncated or broken: copy it again"
        out.breaches += [Breach("ASC008", b.message, path, b.tensor, b.expected, b.found, hint) for b in breaches]
        return
    home = out.files.weight_map
    for tensor, entry in header.entries.items():
        if home is not None and home.get(tensor) != name:
            out.strays.append((tensor, path))
            if tensor in home:
                continue
        if tensor in out.tensors:
            out.breaches.append(Breach("ASC009", "is in two shards", path, tensor))
        out.tensors[tensor] = Stored(source, entry)


def _index(out: Survey) -> None:
    if not out.complete:
        return
    for tensor, name in (out.files.weight_map or {}).items():
        if tensor not in out.tensors:
            out.breaches.append(Breach("ASC009", "is not in the shard named by the index", out.path / name, tensor))


def _group(out: Survey) -> None:
    """Group tensors into layers and others; compare description and tensors both ways."""
    if not out.described:
        out.plain = dict(out.tensors)
        return
    layers: dict[str, dict[str, Stored]] = {}
    for tensor in out.tensors:
        layer, part = split(tensor)
        if part in PARTS and KINDS.get(out.word(f"{layer}.weight") or ""):
            layers.setdefault(layer, {})[part] = out.tensors[tensor]
    taken: set[str] = set()
    for layer, parts in layers.items():
        if _quantized(parts) and out.complete:
            taken |= {f"{layer}.{part}" for part in parts}
            _linear(out, layer, parts)
    out.plain = {n: s for n, s in out.tensors.items() if n not in taken}
    _compare(out, taken)


def _quantized(parts: Mapping[str, Stored]) -> bool:
    """True unless the layer is actually float: the document gives a norm the type of the layer after it."""
    return "weight" not in parts or parts["weight"].entry.dtype in _INTEGERS or len(parts) > 1


def _linear(out: Survey, layer: str, parts: dict[str, Stored]) -> None:
    facts = {part: Facts(s.entry.dtype, s.entry.shape) for part, s in parts.items()}
    where = next(iter(parts.values())).source.path
    kind = KINDS[out.word(f"{layer}.weight") or ""]
    try:
        _one_word(out, layer, parts)
        codec, shape = codec_for(
            kind, facts, group_size=out.description.group_size, packed="version" in out.description.general
        )
    except InputError as e:
        out.refused(e, _code(e), where, f"{layer}.weight")
        return
    out.linears[layer] = Linear(layer, codec, shape, parts)


def _one_word(out: Survey, layer: str, parts: Mapping[str, Stored]) -> None:
    """Check that all parts of a layer have its type. Raises InputError."""
    word = out.word(f"{layer}.weight")
    for part in parts:
        part_word = out.word(f"{layer}.{part}")
        if part_word is not None and part_word != word:
            raise InputError(
                f"{part} and weight have different types", expected=word, found=part_word, hint="polyquant repair"
            )


def _code(error: InputError) -> str:
    if "missing" in error.message:
        return "ASC020"
    if "do not divide" in error.message:
        return "ASC022"
    return "ASC014" if "different types" in error.message else "ASC021"


def _compare(out: Survey, taken: set[str]) -> None:
    types = out.description.types
    for tensor, stored in out.plain.items():
        word = out.word(tensor)
        if word is None:
            out.undescribed.append(tensor)
            integer = stored.entry.dtype in _INTEGERS
            message = "has no type in the description"
            hint = "polyquant repair rewrites the description"
            out.breaches.append(Breach("ASC012", message, stored.source.path, tensor, hint=hint, stops=integer))
        elif word not in (FLOAT, "C8", *KINDS):
            out.unknown.setdefault(word, []).append(tensor)
        elif word in KINDS and split(tensor)[1] in PARTS[1:]:
            if f"{split(tensor)[0]}.weight" not in out.tensors and out.complete:
                message = "belongs to a layer whose weight is missing"
                out.breaches.append(Breach("ASC020", message, stored.source.path, tensor, hint="finish the download"))
        elif word in KINDS and not _shares_type(tensor):
            out.mislabelled.append(tensor)
            if len(stored.entry.shape) > 1 and out.complete:
                actual = f"{stored.entry.dtype} {list(stored.entry.shape)}"
                message = f"is described as {word}, but is a float matrix"
                out.breaches.append(Breach("ASC014", message, stored.source.path, tensor, "I8 [N, K]", actual))
    out.undescribed += [t for t in taken if t not in types]
    out.breaches += _parts_without_type(out, taken)
    if out.complete:
        out.absent = [t for t in types if t not in out.tensors]
    file = out.path / (out.files.description or "")
    hint = "finish the download, or rewrite the description with polyquant repair"
    for tensor in out.absent:
        stops = types[tensor] != FLOAT
        out.breaches.append(
            Breach("ASC013", "is in the description, but in no file", file, tensor, hint=hint, stops=stops)
        )


def _parts_without_type(out: Survey, taken: set[str]) -> Iterator[Breach]:
    for tensor in sorted(taken - set(out.description.types)):
        message, hint = "has no type in the description", "polyquant repair rewrites the description"
        yield Breach("ASC012", message, out.tensors[tensor].source.path, tensor, hint=hint)


def _shares_type(tensor: str) -> bool:
    """True for other tensors with the type of a layer: of the norm before it, and of the cache."""
    layer, part = split(tensor)
    return part in CACHE_PARTS or layer.endswith(".module") or part == "bias"
