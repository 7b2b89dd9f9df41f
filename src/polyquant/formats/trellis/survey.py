"""Reading a Trellis folder as far as it goes: files, headers, metadata, components, and every breach on the way.

`open` raises the first breach; `check` reports all. No payload is read but one header byte a weight.
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
from polyquant.storage.source import Source

__all__ = ["PLUGIN", "Survey", "axes_of", "component", "survey", "survey_file"]

_COMPONENT = re.compile(r"(.+)(__|\.)(indices|scales|su|sv|lut)")
PLUGIN = "polyquant_trellis"
_TRUNCATED = "the tensor is truncated: take the file from its source again"


@dataclass(slots=True)
class Survey:
    """What a folder holds. whole: False if something could not be read, so that absence proves nothing.

    weights: quantized, by true name; plain: all other tensors; underscored: names stored with __ for dots; strays: tensors in shards that
    weight_map does not name there; beside: tensors of the base files; doubled: tensors of base files that the shards have too.
    """

    path: Path
    files: TrellisFiles = field(default_factory=lambda: TrellisFiles(3, ()))
    metadata: Metadata = field(default_factory=Metadata)
    config: dict[str, Any] | None = None
    weights: dict[str, Facts] = field(default_factory=dict)
    plain: dict[str, Stored] = field(default_factory=dict)
    breaches: list[Breach] = field(default_factory=list)
    whole: bool = True
    nbytes: int = 0
    underscored: int = 0
    strays: list[tuple[str, Path]] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)

    def broken(self, error: PolyquantError, code: str, file: Path) -> None:
        """Record a weight file, or all of them, that could not be read."""
        self.whole = False
        self.refused(error, code, file)

    def refused(self, error: PolyquantError, code: str, file: Path) -> None:
        """Record an error that leaves the weight files readable."""
        self.breaches.append(breach_of(error, code, file, leaves="TRL011"))


def component(name: str) -> tuple[str, str, str] | None:
    """(weight, separator, component) of a tensor's name; None for a plain tensor."""
    found = _COMPONENT.fullmatch(name)
    return (found[1], found[2], found[3]) if found else None


def survey(path: Path) -> Survey:
    """Everything about a folder, or about one file of one."""
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
    for folder, name in out.files.names:
        _shard(out, folder, name, tensors, out.files.weight_map)
    for folder, name in out.files.base:
        _base(out, folder, name, tensors)
    _read_metadata(out, path)
    _absent(out, tensors)
    _group(out, tensors)
    return out


def survey_file(out: Survey) -> None:
    """One weight file; what the codes mean stands in the metadata beside it."""
    tensors: dict[str, Stored] = {}
    _shard(out, out.path.parent, out.path.name, tensors, None)
    out.files = TrellisFiles(3, ((out.path.parent, out.path.name),))
    _read_metadata(out, out.path.parent)
    _group(out, tensors)
    hint = "it lies in another shard: open the folder"
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
        message = f"is missing, and config.json says {PLUGIN}: the codes have no meaning without it"
        out.breaches.append(Breach("TRL030", message, folder / files.CONFIG, hint="finish the download"))


def _header(out: Survey, folder: Path, name: str) -> tuple[Source, safetensors.Header] | None:
    """The header of one file; None, and the breaches recorded, if it cannot be used."""
    path = folder / name
    try:
        if member(folder, name) is None:
            out.whole = False
            out.breaches.append(Breach("TRL012", "shard is missing", path, hint="finish the download"))
            return None
        source = Source(path)
    except PolyquantError as e:
        out.broken(e, "TRL017", path)
        return None
    header, breaches = safetensors.survey(source)
    if not breaches:
        return source, header
    out.whole = False
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
            out.breaches.append(Breach("TRL028", f"lies in two files, the other is {other}", folder / name, tensor))
            continue
        tensors[tensor] = Stored(source, entry)


def _base(out: Survey, folder: Path, name: str, tensors: dict[str, Stored]) -> None:
    """Plain tensors beside the shards; those that the shards have too are left to them."""
    opened = _header(out, folder, name)
    if opened is None:
        return
    source, header = opened
    for tensor, entry in header.entries.items():
        if tensor in tensors:
            out.doubled.append(tensor)
            continue
        out.nbytes += entry.nbytes
        out.beside.append(tensor)
        tensors[tensor] = Stored(source, entry)


def _absent(out: Survey, tensors: Mapping[str, Stored]) -> None:
    """Tensors that the index promises."""
    if not out.whole:
        return
    for tensor, name in (out.files.weight_map or {}).items():
        if tensor not in tensors:
            file = out.path / files.INDEX
            out.breaches.append(Breach("TRL013", f"is not in {name}, where the index has it", file, tensor))
    promised = out.metadata.shards
    found = len(out.files.names)
    if promised is not None and out.files.weight_map is None and promised != found:
        message = "shards are missing"
        out.breaches.append(Breach("TRL012", message, out.path / files.WRITER_INDEX, None, promised, found))


def _group(out: Survey, tensors: Mapping[str, Stored]) -> None:
    """Components become weights, under their true names."""
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
            out.breaches.append(Breach("TRL028", "two tensors are this one", stored.source.path, stored_name))
            continue
        target[key] = stored
    for name, parts in components.items():
        if not out.whole and not {"indices", "scales", "su", "sv"} <= set(parts):
            continue
        found = examine(name, parts, out.metadata)
        if isinstance(found, Facts):
            out.weights[name] = found
        else:
            out.breaches += found
    for name in out.plain.keys() & out.weights.keys():
        out.breaches.append(Breach("TRL028", "is stored both quantized and plain", out.weights[name].file, name))
    out.breaches += _without_headers(out.weights)


def _without_headers(weights: Mapping[str, Facts]) -> Iterator[Breach]:
    """Flat indices whose size says other header bytes than those of their siblings.

    Flat indices with a header byte that are one byte short have the size of indices without one, and would decode to noise. The siblings decide. With
    none to decide they are refused: no program is known that writes flat indices without a header. (Three dimensions show what a tile holds.)
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
        because = (
            "no other weight shows that there is no header byte" if alone else f"as {printable(like, 80)} has them"
        )
        expected = f"{32 * f.bits * f.tiles + count} bytes, with {'a header byte' if count == 1 else f'{count} header bytes'}: {because}"
        found = f.components["indices"].entry.nbytes
        yield Breach("TRL022", "component 'indices' has the wrong size", f.file, name, expected, found, _TRUNCATED)


def axes_of(out: Survey, asked: Axes | None) -> tuple[dict[str, Axes], tuple[str, ...]]:
    """The axes of every weight, and notes about those that do not show them.

    A weight that does not show its axes (a square one; any without metadata) has those that all others of its folder show;
    where these show none, or differ, those of the metadata's schema.
    """
    votes: Counter[Axes] = Counter(f.axes for f in out.weights.values() if f.axes is not None)
    silent = [f for f in out.weights.values() if f.axes is None]
    fallback: Axes = "kn" if out.metadata.seed else "nk"
    agreed: Axes = next(iter(votes)) if len(votes) == 1 else fallback
    chosen: Axes = asked or agreed
    found: dict[str, Axes] = {name: asked or f.axes or _own(f) or chosen for name, f in out.weights.items()}
    return found, tuple(_axes_notes(silent, votes, chosen)) if asked is None else (f"axes {asked}, as asked",)


def _own(facts: Facts) -> Axes | None:
    """A codebook says the document's axes."""
    return "kn" if facts.codebook is not None else None


def _axes_notes(silent: list[Facts], votes: Counter[Axes], chosen: Axes) -> Iterator[str]:
    unsure = [f for f in silent if _own(f) is None]
    if not unsure:
        return
    words = {"kn": "[K, N], as in the document", "nk": "[N, K], as in Metal Marlin's code"}
    why = "like all other weights here" if len(votes) == 1 else "by the schema of the metadata"
    first = printable(unsure[0].name, 80)
    yield f"{len(unsure)} weights do not show their axes, e.g. {first}: taken as {words[chosen]}, {why}"
