"""A model as programs see it before they read weights: config.json, tensor headers, file names, or a GGUF header."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from polyquant.opening import look
from polyquant.storage import folder as folders
from polyquant.storage import safetensors, strict_json
from polyquant.storage.locations import is_folder
from polyquant.storage.source import Source, fetch_ahead
from polyquant.types import Checkpoint, Shape

__all__ = ["FUSED", "Model", "Stored", "integer", "read_model"]

INDEX = "model.safetensors.index.json"
MODELOPT = "hf_quant_config.json"
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers that servers join into one matrix."""
_PACKED = 32
_OWN = frozenset({"bias", "g_idx", "weight_g_idx", "q_scale", "k_scale", "v_scale", "output_scale"})
"""Parts that one of several joined layers may have alone: biases, orders, scales of the cache."""
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class Stored(NamedTuple):
    """One tensor in a safetensors header."""

    dtype: str
    shape: Shape
    file: str


@dataclass(frozen=True, slots=True)
class Model:
    """Headers of a model.

    names: files of the folder, empty for a single file. config: config.json. settings: the quantization settings that
    config.json or ModelOpt's file states, None without any; settings_file: where. tensors: of safetensors files.
    layers: name of a module -> suffix -> tensor. gguf: the opened GGUF file.
    """

    path: Path
    names: frozenset[str] = frozenset()
    config: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] | None = None
    settings_file: str = "config.json"
    tensors: Mapping[str, Stored] = field(default_factory=dict)
    layers: Mapping[str, Mapping[str, Stored]] = field(default_factory=dict)
    gguf: Checkpoint | None = None

    @property
    def method(self) -> str | None:
        """quant_method in lower case; None if the settings have none."""
        value = (self.settings or {}).get("quant_method")
        return value.lower() if isinstance(value, str) else None

    def text(self, key: str) -> str | None:
        """A setting that is text."""
        value = (self.settings or {}).get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int | None:
        """An integer of config.json, or of its text model."""
        config = self.config or {}
        value = integer(config, key)
        nested = config.get("text_config")
        return value if value is not None or not isinstance(nested, Mapping) else integer(nested, key)

    @property
    def architecture(self) -> str:
        """The first of `architectures`, "" if there is none."""
        names = (self.config or {}).get("architectures")
        return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""

    @property
    def model_type(self) -> str:
        """`model_type` of config.json."""
        value = (self.config or {}).get("model_type")
        return value if isinstance(value, str) else ""

    def quantized(self) -> Iterator[tuple[str, Mapping[str, Stored]]]:
        """Modules that hold more than float weights."""
        for name, parts in self.layers.items():
            if any(p not in ("weight", "bias") and not p.endswith("norm") for p in parts) or _coded(parts):
                yield name, parts

    @property
    def first_quantized(self) -> str | None:
        """A tensor of the first module that holds more than float weights; None without any."""
        return next((f"{name}.{min(parts)}" for name, parts in self.quantized()), None)

    @property
    def split_count(self) -> int:
        """Number of files that a GGUF file states it is one of; 1 for all others."""
        count = None if self.gguf is None else self.gguf.metadata.get("split.count")
        return count if isinstance(count, int) else 1

    def with_part(self, suffix: str) -> Iterator[tuple[str, Mapping[str, Stored]]]:
        """Modules that have this part."""
        return ((name, parts) for name, parts in self.layers.items() if suffix in parts)

    def mixed(self) -> Iterator[tuple[str, str]]:
        """Layers that servers join, but that are stored differently: (module, description of its parts)."""
        parents = dict.fromkeys(name.rpartition(".")[0] for name in self.layers)
        for parent in parents:
            for group in FUSED:
                here = [p for p in group if f"{parent}.{p}" in self.layers]
                kinds = {p: self._kind(self.layers[f"{parent}.{p}"]) for p in here}
                if len(here) == len(group) and len(set(kinds.values())) > 1:
                    said = ", ".join(f"{p} {_shown(self.layers[f'{parent}.{p}'])}" for p in here)
                    yield f"{parent}.{here[0]}", said

    def _kind(self, parts: Mapping[str, Stored]) -> frozenset[tuple[str, str, Shape]]:
        """The properties that joined layers share: parts, dtypes, and sizes except along the rows of the weight."""
        along = 1 if "qweight" in parts else 0
        return frozenset(
            (part, t.dtype, t.shape[:along] + t.shape[along + 1 :]) for part, t in parts.items() if part not in _OWN
        )

    def size(self, name: str) -> tuple[int, int] | None:
        """(rows, columns) of a module's weight; None if the headers do not show it."""
        parts = self.layers.get(name, {})
        if "qweight" in parts:
            return self._packed_size(parts)
        for part in ("weight_packed", "weight"):
            stored = parts.get(part)
            if stored is None or len(stored.shape) != 2:
                continue
            rows, columns = stored.shape
            if stored.dtype == "U8":
                return rows, columns * 2
            if part == "weight_packed":
                stated = self.columns(name)
                return rows, stated if stated is not None else columns * _PACKED // 4
            return rows, columns
        return None

    def _packed_size(self, parts: Mapping[str, Stored]) -> tuple[int, int] | None:
        qweight, scales = parts["qweight"].shape, parts["scales"].shape if "scales" in parts else ()
        if len(qweight) != 2 or len(scales) != 2:
            return None
        columns = parts["g_idx"].shape[0] if "g_idx" in parts and parts["g_idx"].shape else 0
        if qweight[1] != scales[1]:  # AWQ packs along the rows
            return scales[1], qweight[0]
        bits = integer(self.settings or {}, "bits", "w_bit") or 4
        return scales[1], columns or qweight[0] * _PACKED // bits

    def columns(self, name: str) -> int | None:
        """Input size of a linear layer with a usual name, from config.json."""
        heads, hidden = self.number("num_attention_heads"), self.number("hidden_size")
        last = name.rpartition(".")[2]
        if last in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            return hidden
        if last == "down_proj":
            return self.number("intermediate_size")
        if last == "o_proj" and heads and hidden:
            return heads * (self.number("head_dim") or hidden // heads)
        return None


def integer(values: Mapping[str, Any], *keys: str) -> int | None:
    """The first of these entries that is an integer."""
    for key in keys:
        value = values.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def read_model(path: Path) -> Model:
    """Read the headers of a file or folder. Raises InputError, UnsupportedError."""
    if not is_folder(path):
        checkpoint = look(path)
        return Model(path, gguf=checkpoint if checkpoint.naming == "gguf" else None)
    names = frozenset(folders.entries(path))
    config = folders.read_config(path)
    settings, file = _settings(path, config or {}, names)
    tensors = _tensors(path, names)
    return Model(path, names, config, settings, file, tensors, _layers(tensors))


def _settings(path: Path, config: Mapping[str, Any], names: frozenset[str]) -> tuple[Mapping[str, Any] | None, str]:
    """The quantization settings that programs read, and the file with them."""
    nested = config.get("text_config")
    for place in (config, nested if isinstance(nested, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(place.get(key), Mapping):
                return place[key], "config.json"
    file = folders.member(path, MODELOPT) if MODELOPT in names else None
    content = strict_json.read(file) if file is not None else None
    inner = content.get("quantization") if isinstance(content, Mapping) else None
    return ({"quant_method": "modelopt", **inner}, MODELOPT) if isinstance(inner, Mapping) else (None, "config.json")


def _tensors(path: Path, names: frozenset[str]) -> dict[str, Stored]:
    """Tensors of the files in the index, or of all safetensors files without one."""
    chosen = sorted(n for n in names if n.endswith(".safetensors"))
    if INDEX in names and "model.safetensors" not in names:
        listed, _ = folders.read_index(path, INDEX)
        chosen = sorted(set(listed.values()) & names)
    files = [(name, file) for name in chosen if (file := folders.member(path, name)) is not None]
    fetch_ahead((file for _, file in files), safetensors.touch_header)
    found: dict[str, Stored] = {}
    for name, file in files:
        source = Source(file)
        for tensor, entry in safetensors.read_header(source).entries.items():
            found[tensor] = Stored(entry.dtype, entry.shape, name)
        source.close()
    return found


def _layers(tensors: Mapping[str, Stored]) -> dict[str, dict[str, Stored]]:
    layers: dict[str, dict[str, Stored]] = {}
    for name, stored in tensors.items():
        before, sign, after = name.rpartition(".weight.")  # bitsandbytes: X.weight.absmax
        module, _, part = (before, sign, f"weight.{after}") if sign else name.rpartition(".")
        layers.setdefault(module, {})[part] = stored
    return layers


def _coded(parts: Mapping[str, Stored]) -> bool:
    return "weight" in parts and parts["weight"].dtype not in _FLOATS


def _shown(parts: Mapping[str, Stored]) -> str:
    weight = next((parts[p] for p in ("weight", "weight_packed", "qweight") if p in parts), None)
    return f"{weight.dtype} {list(weight.shape)}" if weight is not None else "without a weight"
