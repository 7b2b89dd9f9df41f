"""Repair an msModelSlim folder into a new folder.

Description, deq_scale and its storage, quant_bias, file names, index, and the quantization_config left in config.json
are recomputed. Any other error is reported, and nothing is written. Valid tensors are copied byte for byte.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.dtypes import codec_of
from polyquant.errors import PlanError, UnsupportedError, printable
from polyquant.formats.existing import refuse_target, replaceable
from polyquant.formats.msmodelslim.check import check
from polyquant.formats.msmodelslim.check_layers import deq_floats, floats, stored
from polyquant.formats.msmodelslim.description import KINDS
from polyquant.formats.msmodelslim.folder import descriptions
from polyquant.formats.msmodelslim.layout import SHARD_BYTES, lay_out
from polyquant.formats.msmodelslim.repair_types import Layer, layers
from polyquant.formats.msmodelslim.static import closest_deq_scale, closest_quant_bias, row_sums
from polyquant.formats.msmodelslim.survey import Stored, Survey, survey
from polyquant.formats.progress import shows_progress
from polyquant.formats.steps import Progress
from polyquant.opening import detect
from polyquant.ops.int8 import quant_bias
from polyquant.storage import strict_json
from polyquant.storage.folder import entries, member
from polyquant.storage.locations import located
from polyquant.storage.source import FileState, file_bytes, opened_files, refuse_changed
from polyquant.storage.staging import Staging, staged
from polyquant.types import ArraySpec, Finding, Layout, Severity, TensorSpec

__all__ = ["Repaired", "repair"]

_REPAIRABLE = frozenset(f"ASC{n:03}" for n in (3, 5, 9, 10, 11, 12, 13, 14, 16, 20, 26, 27, 28, 29, 30, 43))
"""Codes of repairable errors; 20 if deq_scale or quant_bias is missing."""
_BLOCK = 1 << 24
_SIDE_BYTES = 64 << 20
_Values = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, repr=False)
class Repaired:
    """The result. path: the new folder, None if there was nothing to repair; changes: one line each; left: remaining
    warnings.
    """

    path: Path | None
    changes: tuple[str, ...]
    left: tuple[Finding, ...]

    def __repr__(self) -> str:
        where = "nothing written" if self.path is None else printable(self.path)
        return f"<Repaired {where}: {len(self.changes)} changes, {len(self.left)} findings left>"


@dataclass(slots=True)
class _Changes:
    """Layers with their codecs, and their recomputed parts."""

    layers: list[Layer]
    values: dict[str, _Values]
    changes: list[str]


@shows_progress("repair")
def repair(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    kind: str | None = None,
    dialect: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Repaired:
    """Repair the folder `src` into the new folder `dst`.

    kind: the type ("W8A16", ...) of layers whose type cannot be determined. dialect: "v1", "ascendv1" or "v0" for file
    names and keys; default: that of `src`. Raises PlanError for errors that cannot be repaired, InputError,
    UnsupportedError for another format, UnknownNameError.
    """
    source, target = located(src), located(dst)
    refuse_target(target, source, overwrite=overwrite)
    form, _ = detect(source)
    if form.name != "msmodelslim":
        raise UnsupportedError("only msModelSlim folders can be repaired", file=source, found=form.name)
    findings = list(check(source))
    _refuse(f for f in findings if f.severity is Severity.ERROR and f.code not in _REPAIRABLE)
    if dialect is None and not any(f.severity is not Severity.NOTE and f.code in _REPAIRABLE for f in findings):
        return Repaired(None, (), tuple(f for f in findings if f.severity is not Severity.NOTE))
    with opened_files() as opened:
        contents = survey(source, indexed=False)
    for breach in contents.breaches:
        if breach.code in ("ASC004", "ASC005", "ASC006", "ASC007", "ASC008"):
            raise breach.error()
    repaired = _Changes([], {}, [])
    for layer in layers(contents, kind):
        _repair_layer(contents, layer, repaired)
    layout = _lay_out(contents, repaired, _dialect(contents, repaired, dialect))
    changes = (*_file_changes(contents, layout), *_grouped(repaired.changes))
    left = _write(contents, opened, repaired, layout, target, overwrite=overwrite, on_progress=on_progress)
    return Repaired(target, changes, left)


def _refuse(errors: Iterable[Finding]) -> None:
    """Raise PlanError for the first of these findings, if there is one."""
    listed = list(errors)
    if listed:
        first, more = listed[0], f", and {len(listed) - 1} more errors" if len(listed) > 1 else ""
        raise PlanError(
            f"cannot be repaired: {first.message}{more}", file=first.file, tensor=first.tensor,
            hint=f"polyquant explain {first.code}",
        )  # fmt: skip


# ---------------------------------------------------------------- layers


def _repair_layer(contents: Survey, layer: Layer, out: _Changes) -> None:
    """Repair one layer: the right storage of deq_scale, and recomputed parts."""
    codec, values = layer.codec, dict[str, NDArray[Any]]()
    if codec.static:
        model = contents.model_dtype
        wide = codec.wide if model is None else model[0] != "BF16"
        if wide != codec.wide and "deq_scale" not in layer.missing:
            out.changes.append(f"deq_scale stored as {'int64' if wide else 'float32'}|{layer.name}")
        codec = codec.configure(wide=wide)
        values = _static(contents, replace(layer, codec=codec), out.changes)
    out.layers.append(replace(layer, codec=codec))
    if values:
        out.values[f"{layer.name}.weight"] = values


def _static(contents: Survey, layer: Layer, changes: list[str]) -> _Values:
    parts, (n, k) = layer.parts, layer.shape
    scale, offset = floats(parts["input_scale"]), floats(parts["input_offset"])
    have = (
        None if "deq_scale" in layer.missing else stored(parts["deq_scale"]).read(0, parts["deq_scale"].entry.shape[0])
    )
    deq = _deq_scale(layer, scale, have, changes)
    values: _Values = {}
    as_stored = deq.view(np.uint32).astype(np.int64) if layer.codec.wide else deq
    if have is None or have.dtype != as_stored.dtype or not np.array_equal(have, as_stored):
        values["deq_scale"] = as_stored
    own = contents.tensors.get(f"{layer.name}.bias")
    if own is not None and (own.entry.shape != (n,) or own.entry.dtype not in ("F32", "F16", "BF16")):
        raise PlanError("cannot be repaired: the layer's bias does not fit its rows", tensor=f"{layer.name}.bias")
    bias, sums = floats(own) if own is not None else None, row_sums(stored(parts["weight"]), n, k)
    old = None if "quant_bias" in layer.missing else stored(parts["quant_bias"]).read(0, n)
    want = quant_bias(bias, deq, offset, sums)
    if old is not None:
        want = closest_quant_bias(bias, deq, offset, sums, np.asarray(old, np.float64))
    if not (np.abs(want) < 2**31).all():
        raise PlanError(
            "cannot be repaired: quant_bias does not fit int32",
            tensor=f"{layer.name}.quant_bias",
            hint="quantize this layer again",
        )
    if old is None or (np.abs(old - want) > 1 + 1e-6 * np.abs(want)).any():
        changes.append(f"quant_bias {'added' if old is None else 'recomputed'}|{layer.name}")
        values["quant_bias"] = want.astype(np.int32)
    return values


def _deq_scale(
    layer: Layer, scale: NDArray[np.float32], have: NDArray[Any] | None, changes: list[str]
) -> NDArray[np.float32]:
    """deq_scale as float32: the stored one if it is right or cannot be checked, else the product. Raises PlanError."""
    inside = have is not None and (have.dtype != np.int64 or bool(((have >= 0) & (have <= 0xFFFFFFFF)).all()))
    old = deq_floats(have) if have is not None else None
    if "weight_scale" not in layer.parts:
        if old is None or not inside:
            raise PlanError(
                "cannot be repaired: deq_scale cannot be recomputed without weight_scale",
                tensor=f"{layer.name}.deq_scale",
                hint="quantize this layer again",
            )
        return old
    want = closest_deq_scale(scale, floats(layer.parts["weight_scale"]).reshape(-1), old)
    if not (np.isfinite(want).all() and (want > 0).all()):
        raise PlanError(
            "cannot be repaired: input_scale * weight_scale is not positive and finite",
            tensor=f"{layer.name}.weight_scale",
            hint="quantize this layer again",
        )
    if old is None or not inside or not np.array_equal(want, old):
        changes.append(f"deq_scale {'added' if old is None else 'recomputed'}|{layer.name}")
    return np.ascontiguousarray(want)


def _grouped(changes: list[str]) -> list[str]:
    """Merge the same change of many layers into one line."""
    by_what: dict[str, list[str]] = {}
    for change in changes:
        what, _, layer = change.partition("|")
        by_what.setdefault(what, []).append(layer)
    return [
        f"{what}: {names[0]}" if len(names) == 1 else f"{what} in {len(names)} layers, e.g. {names[0]}"
        for what, names in by_what.items()
    ]


# ---------------------------------------------------------------- files


def _dialect(contents: Survey, repaired: _Changes, requested: str | None) -> str:
    """The requested dialect, else that of the folder; packed codes need one with a version."""
    name = requested or contents.dialect[0]
    if requested is None and name == "v0" and any(x.codec.packing for x in repaired.layers):
        return "ascendv1"
    return name


def _lay_out(contents: Survey, repaired: _Changes, dialect: str) -> Layout:
    quantized = {f"{x.name}.{part}" for x in repaired.layers for part in x.parts}
    specs = [TensorSpec(f"{x.name}.weight", x.shape, x.codec) for x in repaired.layers]
    words = {}
    for name, at in contents.tensors.items():
        if name in quantized:
            continue
        specs.append(TensorSpec(name, at.entry.shape, codec_of(at.entry.dtype, at.entry.nbytes)))
        word = contents.word(name)
        if word is not None and not (word in KINDS and len(at.entry.shape) > 1):
            words[name] = word
    sizes = {
        p: sum(s.entry.nbytes for s in contents.tensors.values() if s.source.path.name == p)
        for p in contents.files.names
    }
    longest = max(sizes.values()) + 1 if len(sizes) > 1 else SHARD_BYTES
    carried = {k: v for k, v in contents.description.general.items() if k not in contents.tensors}
    return lay_out(specs, _side_files(contents), shard_bytes=longest, dialect=dialect, words=words, carried=carried)


def _side_files(contents: Survey) -> dict[str, bytes]:
    """All small files of the folder: config, tokenizer, and others. Raises PlanError if they are too large."""
    names = entries(contents.path)
    weights = {n for n in names if n.endswith((".safetensors", ".safetensors.index.json"))} | set(descriptions(names))
    out: dict[str, bytes] = {}
    for name in names:
        if name in weights or name.startswith(".") or (contents.path / name).is_dir():
            continue
        file = member(contents.path, name)
        if file is not None:
            if sum(map(len, out.values())) + file.stat().st_size > _SIDE_BYTES:
                raise PlanError("too large for an additional file", file=file, hint="move it out of the folder")
            out[name] = file_bytes(file)
    return out


def _file_changes(contents: Survey, layout: Layout) -> list[str]:
    """Changes of names, config.json and the description."""
    out = []
    new = [f.name for f in layout.files if f.name.endswith(".safetensors")]
    if list(contents.files.names) != new:
        out.append(f"weights: {_listed(contents.files.names)} now {_listed(new)}")
    (name,) = (n for n in descriptions([f.name for f in layout.files]))
    if contents.files.description not in (None, name):
        out.append(f"description: {contents.files.description} now {name}")
    plans = {f.name: b"".join(data for _, data in f.pieces) for f in layout.files}
    if (contents.config or {}).get("quantization_config") is not None:
        out.append("config.json: quantization_config removed")
    if contents.described:
        new_description: Mapping[str, Any] = strict_json.parse(plans[name], strict_json.INDEX)
        out += _differences({**contents.description.general, **contents.description.types}, new_description)
    else:
        out.append(f"{name}: written from dtypes and shapes")
    indexed = survey(contents.path)
    if indexed.strays or any(b.code in ("ASC005", "ASC009") for b in indexed.breaches):
        out.append("index: rewritten")
    strays = [n for n in entries(contents.path) if n.endswith(".safetensors") and n not in contents.files.names]
    if strays:
        out.append(f"not part of the model, not copied: {', '.join(strays)}")
    return out


def _listed(names: Any) -> str:
    names = list(names)
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    groups = {
        "added": [k for k in new if k not in old],
        "removed": [k for k in old if k not in new],
        "changed": [k for k in new if k in old and old[k] != new[k]],
    }
    return [f"description: {len(keys)} entries {what}, e.g. {keys[0]}" for what, keys in groups.items() if keys]


# ---------------------------------------------------------------- writing


def _write(
    contents: Survey,
    opened: Mapping[Path, FileState],
    repaired: _Changes,
    layout: Layout,
    target: Path,
    *,
    overwrite: bool,
    on_progress: Callable[[Progress], None] | None,
) -> tuple[Finding, ...]:
    """Stage and check the output, then publish it. Raises PlanError if errors remain."""
    parts = {f"{x.name}.weight": x.parts for x in repaired.layers}
    job = json.dumps([str(contents.path), sorted((f.name, f.size) for f in layout.files)])
    total, done = max(1, sum(slot.spec.nbytes for slot in layout.slots.values())), 0
    with staged(
        target, layout, job, resume="never", replaceable=replaceable if overwrite else None,
        check=lambda: refuse_changed(opened),
    ) as staging:  # fmt: skip
        for (name, part), slot in layout.slots.items():
            fresh = repaired.values.get(name, {}).get(part)
            if fresh is not None:
                staging.write(name, part, 0, np.ascontiguousarray(fresh))
            else:
                _copy(staging, name, part, (parts[name][part] if name in parts else contents.tensors[name]))
            done += slot.spec.nbytes
            if on_progress is not None:
                on_progress(Progress(done, total, name, 0.0))
        remaining = list(check(staging.folder))
        _refuse(f for f in remaining if f.severity is Severity.ERROR)
    return tuple(f for f in remaining if f.severity is not Severity.NOTE)


def _copy(staging: Staging, name: str, part: str, at: Stored) -> None:
    """Copy the tensor's bytes in blocks."""
    array = at.entry.array(at.source, ArraySpec((at.entry.nbytes,), np.dtype(np.uint8)))
    for a in range(0, at.entry.nbytes, _BLOCK):
        staging.write(name, part, a, array.read(a, min(at.entry.nbytes, a + _BLOCK)))
