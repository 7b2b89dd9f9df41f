"""Read a Trellis folder as far as possible: files, headers, metadata, components, and all violations found.

`open` raises the first one; `check` reports all. Of payloads only one header byte per weight is read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polyquant.errors import PolyquantError, printable
from polyquant.formats.breach import Breach, breach_of
from polyquant.formats.stored import Stored
from polyquant.formats.trellis import folder as files
from polyquant.formats.trellis.folder import TrellisFiles
from polyquant.formats.trellis.metadata import Metadata, read_metadata
from polyquant.formats.trellis.weights import Axes, Facts, examine
from polyquant.storage import safetensors
from polyquant.storage.folder import member, read_config
from polyquant.storage.source import Source, fetch_ahead

__all__ = ["PLUGIN", "Survey", "axes_of", "component", "survey", "survey_file"]

_COMPONENT = re.compile(r"(.+)(__|\.)(indices|scales|su|sv|lut)")
PLUGIN = "polyquant_trellis"
_TRUNCATED = "the tensor is truncated: download the file again"


@dataclass(slots=True)
class Survey:
    """The contents of a folder. complete: False if something could not be read, so that absence proves nothing.

    weights: quantized, by true name; plain: all other tensors; underscored: number of names with __ instead of dots;
    strays: tensors in shards that weight_map does not assign there; unindexed: tensors of the base files; duplicates:
    tensors of base files that are also in the shards.
    """

    path: Path
    files: TrellisFiles = field(default_factory=lambda: TrellisFiles(3, ()))
    metadata: Metadata = field(default_factory=Metadata)
    config: dict[str, Any] | None = None
    weights: dict[str, Facts] = field(default_factory=dict)
    plain: dict[str, Stored] = field(default_factory=dict)
    breaches: list[Breach] = field(default_factory=list)
    complete: bool = True
    nbytes: int = 0
    underscored: int = 0
    strays: list[tuple[str, Path]] = field(default_factory=list)
    unindexed: list[str] = field(default_factory=list)
    duplicates: list[str] = field(default_factory=list)

    def broken(self, error: PolyquantError, code: str, file: Path) -> None:
        """Record weight files that could not be read."""
        self.complete = False
        self.refused(error, code, file)

    def refused(self, error: PolyquantError, code: str, file: Path) -> None:
        """Record an error that leaves the weight files readable."""
        self.breaches.append(breach_of(error, code, file, leaves="TRL011"))


def component(name: str) -> tuple[str, str, str] | None:
    """(weight, separator, component) of a tensor's name; None for a plain tensor."""
    match = _COMPONENT.fullmatch(name)
    return (match[1], match[2], match[3]) if match else None


def survey(path: Path) -> Survey:
    """Survey a folder, or a single file of one."""
    out = Survey(path)
    if not path.is_dir():
        survey_file(out)
        return out
    try:
        out.config = read_config(path)
    except PolyquantError as e:
        out.refused(e, "TRL002", path / "config.json")
    try:
        out.files = files.choose(path)
    except PolyquantError as e:
        about_json = isinstance(e.file, Path) and e.file.suffix == ".json"
        out.broken(e, "TRL019" if e.file == path else "TRL010" if about_json else "TRL017", path)
        return out
    tensors: dict[str, Stored] = {}
    named = (*out.files.names, *out.files.base)
    fetch_ahead((folder / name for folder, name in named), safetensors.touch_header)
    for folder, name in out.files.names:
        _shard(out, folder, name, tensors, out.files.weight_map)
    for folder, name in out.files.base:
        _base(out, folder, name, tensors)
    _read_metadata(out, path)
    _absent(out, tensors)
    _group(out, tensors)
    return out


def survey_file(out: Survey) -> None:
    """Survey one weight file, with the metadata of its folder."""
    tensors: dict[str, Stored] = {}
    _shard(out, out.path.parent, out.path.name, tensors, None)
    out.files = TrellisFiles(3, ((out.path.parent, out.path.name),))
    _read_metadata(out, out.path.parent)
    _group(out, tensors)
    hint = "it is in another shard: open the folder"
    out.breaches = [replace(b, hint=hint) if b.code == "TRL020" else b for b in out.breaches]


def _read_metadata(out: Survey, folder: Path) -> None:
    try:
        out.metadata = read_metadata(folder, out.files.layers)
    except PolyquantError as e:
        out.refused(e, "TRL031", folder / files.CONFIG)
        return
    quantization = (out.config or {}).get("quantization_config")
    ours = isinstance(quantization, dict) and quantization.get("quant_method") == PLUGIN
    if ours and out.metadata.content is None:
        message = f"is missing, but config.json declares {PLUGIN}: the codes cannot be decoded without it"
        out.breaches.append(Breach("TRL030", message, folder / files.CONFIG, hint="finish the download"))


def _header(out: Survey, folder: Path, name: str) -> tuple[Source, safetensors.Header] | None:
    """The header of one file; None, with the violations recorded, if it cannot be used."""
    path = folder / name
    try:
        if member(folder, name) is None:
            out.complete = False
            out.breaches.append(Breach("TRL012", "shard is missing", path, hint="finish the download"))
            return None
        source = Source(path)
    except PolyquantError as e:
        out.broken(e, "TRL017", path)
        return None
    header, breaches = safetensors.survey(source)
    if not breaches:
        return source, header
    out.complete = False
    for b in breaches:
        out.breaches.append(Breach("TRL018", b.message, path, b.tensor, b.expected, b.found))
    return None


def _shard(
    out: Survey, folder: Path, name: str, tensors: dict[str, Stored], weight_map: Mapping[str, str] | None
) -> None:
    opened = _header(out, folder, name)
    if opened is None:
        return
    source, header = opened
    for tensor, entry in header.entries.items():
        out.nbytes += entry.nbytes
        home = name if weight_map is None else weight_map.get(tensor)
        if home != name:
            out.strays.append((tensor, folder / name))
            if home is not None:
                continue
        if tensor in tensors:
            other = tensors[tensor].source.path.name
            out.breaches.append(Breach("TRL028", f"is in two files, the other is {other}", folder / name, tensor))
            continue
        tensors[tensor] = Stored(source, entry)


def _base(out: Survey, folder: Path, name: str, tensors: dict[str, Stored]) -> None:
    """Add plain tensors of a base file; those also in the shards are skipped."""
    opened = _header(out, folder, name)
    if opened is None:
        return
    source, header = opened
    for tensor, entry in header.entries.items():
        if tensor in tensors:
            out.duplicates.append(tensor)
            continue
        out.nbytes += entry.nbytes
        out.unindexed.append(tensor)
        tensors[tensor] = Stored(source, entry)


def _absent(out: Survey, tensors: Mapping[str, Stored]) -> None:
    """Record tensors and shards that the index lists but are missing."""
    if not out.complete:
        return
    for tensor, name in (out.files.weight_map or {}).items():
        if tensor not in tensors:
            file = out.path / files.INDEX
            out.breaches.append(Breach("TRL013", f"is not in {name}, which the index names", file, tensor))
    expected = out.metadata.shards
    count = len(out.files.names)
    if expected is not None and out.files.weight_map is None and expected != count:
        message = "shards are missing"
        out.breaches.append(Breach("TRL012", message, out.path / files.WRITER_INDEX, None, expected, count))


def _group(out: Survey, tensors: Mapping[str, Stored]) -> None:
    """Group components to weights, under their true names."""
    flat = {name.replace(".", "__"): name for name in out.metadata.notes}
    components: dict[str, dict[str, Stored]] = {}
    for stored_name, stored in tensors.items():
        split = component(stored_name)
        stem = split[0] if split else stored_name
        name = stem
        if (split is not None and split[1] == "__") or "." not in stem:
            name = flat.get(stem, stem.replace("__", "."))
            out.underscored += name != stem
        if split is None:
            target: dict[str, Stored] = out.plain
            key = name
        else:
            target, key = components.setdefault(name, {}), split[2]
        if key in target:
            out.breaches.append(Breach("TRL028", "two tensors have this name", stored.source.path, stored_name))
            continue
        target[key] = stored
    for name, parts in components.items():
        if not out.complete and not {"indices", "scales", "su", "sv"} <= set(parts):
            continue
        facts = examine(name, parts, out.metadata)
        if isinstance(facts, Facts):
            out.weights[name] = facts
        else:
            out.breaches += facts
    for name in out.plain.keys() & out.weights.keys():
        out.breaches.append(Breach("TRL028", "is stored both quantized and plain", out.weights[name].file, name))
    out.breaches += _without_headers(out.weights)


def _without_headers(weights: Mapping[str, Facts]) -> Iterator[Breach]:
    """Violations of flat indices whose size implies other header bytes than those of the other weights.

    Flat indices with a header byte that are one byte short have the size of indices without one, and would decode to
    noise. The other weights decide. If there are none, the indices are rejected: no known program writes flat indices
    without a header. (Three dimensions show the size of a tile.)
    """
    forms = Counter(f.headers for f in weights.values() if f.headers != "none")
    usual = forms.most_common(1)[0][0] if forms else "none"
    like = next((n for n, f in weights.items() if f.headers == usual), "")
    for name, f in weights.items():
        alone = f.headers == "none" and len(weights) == 1 and f.codebook is None
        same = f.headers == usual or (f.tiles == 1 and f.headers != "none")
        if not f.flat or (same and not alone):
            continue
        count = f.tiles if usual == "tile" else 1
        because = "no other weight shows that there is no header byte" if alone else f"as in {printable(like, 80)}"
        headers = "a header byte" if count == 1 else f"{count} header bytes"
        expected = f"{32 * f.bits * f.tiles + count} bytes, with {headers}: {because}"
        nbytes = f.components["indices"].entry.nbytes
        yield Breach("TRL022", "component 'indices' has the wrong size", f.file, name, expected, nbytes, _TRUNCATED)


def axes_of(out: Survey, requested: Axes | None) -> tuple[dict[str, Axes], tuple[str, ...]]:
    """The axes of every weight, and notes about ambiguous ones.

    A weight with ambiguous axes (a square one; any without metadata) gets the axes of all others of its folder; if
    these are ambiguous too, or differ, those of the metadata's schema.
    """
    votes: Counter[Axes] = Counter(f.axes for f in out.weights.values() if f.axes is not None)
    ambiguous = [f for f in out.weights.values() if f.axes is None]
    fallback: Axes = "kn" if out.metadata.seed else "nk"
    agreed: Axes = next(iter(votes)) if len(votes) == 1 else fallback
    chosen: Axes = requested or agreed
    axes: dict[str, Axes] = {name: requested or f.axes or _own(f) or chosen for name, f in out.weights.items()}
    return axes, tuple(_axes_notes(ambiguous, votes, chosen)) if requested is None else (
        f"axes {requested}, as requested",
    )


def _own(facts: Facts) -> Axes | None:
    """The documented axes for weights with a codebook, else None."""
    return "kn" if facts.codebook is not None else None


def _axes_notes(ambiguous: list[Facts], votes: Counter[Axes], chosen: Axes) -> Iterator[str]:
    unsure = [f for f in ambiguous if _own(f) is None]
    if not unsure:
        return
    words = {"kn": "[K, N], as in the document", "nk": "[N, K], as in Metal Marlin's code"}
    why = "like all other weights of the folder" if len(votes) == 1 else "by the schema of the metadata"
    first = printable(unsure[0].name, 80)
    yield f"{len(unsure)} weights have ambiguous axes, e.g. {first}: assumed {words[chosen]}, {why}"
