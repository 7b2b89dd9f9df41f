"""Write a model into an OCI image layout: each file is one raw layer, found by its name in an annotation.

    cncf      application/vnd.cncf.model. + config.v1+json; weight.v1.raw, weight.config.v1.raw, doc.v1.raw
    docker    application/vnd.docker.ai. + model.config.v0.1+json (v0.2 for a folder); gguf.v3, safetensors, model.file,
              chat.template.jinja, license

Sources: docs/spec.md, docs/config.md and docs/annotations.md of modelpack/model-spec d78bf32; pkg/distribution/types
and builder of docker/model-runner 642c721, which also reads the first set; image-layout.md of opencontainers/image-spec
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from polyquant.errors import InputError, PlanError, printable
from polyquant.formats.gguf.reading import headers, sniff
from polyquant.formats.steps import Progress
from polyquant.opening import look
from polyquant.packing.facts import UNKNOWN, counted, facts_of
from polyquant.packing.request import Layer, Meter, Packed, layer_json, layer_of
from polyquant.packing.targets import folder_at, make_folders
from polyquant.storage.claims import candidates, parent_locked, settle_all
from polyquant.storage.folder import member
from polyquant.storage.one_file import write_file
from polyquant.storage.pieces import Piece, Span, length
from polyquant.storage.source import Source
from polyquant.storage.stored_path import StoredPath
from polyquant.storage.stores import layouts
from polyquant.storage.stores.blobs import adding
from polyquant.storage.stores.manifests import in_store
from polyquant.storage.stores.names import ModelName
from polyquant.types import Checkpoint

__all__ = ["MediaTypes", "pack_oci"]

MediaTypes = Literal["cncf", "docker"]
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"
_CNCF = "application/vnd.cncf.model."
_DOCKER = "application/vnd.docker.ai."
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_DOCS = ("readme", "license", "licence", "notice", "copying")
_DEPTH = 2
_MOST_FILES = 10_000
_TITLE = "org.opencontainers.image.title"


@dataclass(frozen=True, slots=True)
class _Model:
    """The files of a model by name, and the facts for its config."""

    files: Mapping[str, Path]
    family: str
    weights: int
    file_type: str
    kind: str


def pack_oci(
    model: Path,
    folder: Path,
    name: ModelName,
    *,
    media_types: MediaTypes = "cncf",
    link: bool = False,
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Packed:
    """Pack a GGUF file, all files of a split one, or a folder. Raises PlanError, InputError, OSError."""
    found = _files(model)
    for entry in (layouts.LAYOUT, layouts.INDEX):
        settle_all((folder / entry).absolute())
    _refuse_tag(folder, name, overwrite=overwrite)
    folder_at(folder, (layouts.LAYOUT,), "an OCI image layout", unfinished=layouts.BLOBS)
    blobs = folder / layouts.BLOBS / "sha256"
    make_folders(blobs, folder)
    pieces: dict[str, list[Piece]] = {n: [Span(s := Source(p), 0, s.size)] for n, p in found.files.items()}
    meter = Meter(sum(map(length, pieces.values())), on_progress)
    job = f"{name.model}-{name.tag}"
    with adding(blobs, job, len(pieces) + 2, prefix="", on_bytes=meter) as new:
        layers = []
        for file, content in pieces.items():
            meter.start(file)
            layers.append(layer_of(file, _media_type(file, media_types), new.add(content, link=link)))
        config_type, config = _config(found, name, layers, media_types)
        made = layer_of("config", config_type, new.add_bytes(_json(config)))
        manifest = new.add_bytes(_json(_manifest(made, layers, name, media_types)))
        new.publish()
    layout = folder / layouts.LAYOUT
    if not layout.exists():
        write_file(layout, _json({"imageLayoutVersion": "1.0.0"}), overwrite=False)
        if left := candidates(layout.absolute(), parts=False):
            raise PlanError("the work folder could not be removed", file=left[0], hint="remove it, then try again")
    path = layouts.blob_path(folder, manifest.descriptor(_MANIFEST))
    added = layer_json(manifest.descriptor(_MANIFEST), {layouts.TAG: name.tag})
    _add_to_index(folder, added, name, overwrite=overwrite)
    reference = f"oci:{folder}:{name.tag}"
    return Packed(path, folder, f"{name.model}:{name.tag}", reference, manifest.digest, (*layers, made))


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _files(model: Path) -> _Model:
    """Open the model, so that a broken one is refused, and list its files."""
    checkpoint = look(model)
    if sniff(model) is not None:
        paths = [h.source.path for h in headers(model)]
        facts = facts_of(checkpoint, checkpoint.metadata)
        files = {"model.gguf" if in_store(p) and not isinstance(p, StoredPath) else p.name: p for p in paths}
        return _Model(files, facts.family, facts.weights, facts.file_type, "gguf")
    if not model.is_dir():
        return _Model({model.name: model}, UNKNOWN, _weights(checkpoint), UNKNOWN, _kind(model.name))
    files = dict(_inside(model, "", _DEPTH))
    if len(files) > _MOST_FILES:
        raise InputError("the folder has too many files", file=model, expected=f"at most {_MOST_FILES}")
    family = checkpoint.config.get("model_type")
    kinds = [_kind(n) for n in files if n.lower().endswith(_WEIGHTS)]
    scheme = checkpoint.config.get("quantization_config")
    method = scheme.get("quant_method") if isinstance(scheme, Mapping) else None
    return _Model(
        files,
        family if isinstance(family, str) else UNKNOWN,
        _weights(checkpoint),
        method if isinstance(method, str) else UNKNOWN,
        max(kinds, key=kinds.count, default="safetensors"),
    )


def _weights(checkpoint: Checkpoint) -> int:
    return sum(math.prod(w.shape) for w in checkpoint.values())


def _kind(name: str) -> str:
    ending = name.rpartition(".")[2].lower()
    return ending if ending in ("gguf", "safetensors") else "pt"


def _inside(folder: Path, before: str, depth: int) -> list[tuple[str, Path]]:
    """The files of a folder, sorted, without hidden ones. Raises InputError for a folder that is too deep."""
    out = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if not path.is_dir():
            if member(folder, path.name) is not None:  # refuses links to other folders
                out.append((before + path.name, path))
        elif depth > 1:
            out += _inside(path, f"{before}{path.name}/", depth - 1)
        else:
            raise InputError("a model's folder has at most one level of folders", file=path)
    return out


def _media_type(file: str, media_types: MediaTypes) -> str:
    base = file.rpartition("/")[2].lower()
    weight, doc = base.endswith(_WEIGHTS), base.startswith(_DOCS)
    if media_types == "cncf":
        kind = "weight.v1.raw" if weight else "doc.v1.raw" if doc else "weight.config.v1.raw"
        return _CNCF + kind
    if base.endswith(".gguf"):
        return f"{_DOCKER}gguf.v3"
    if base.endswith(".safetensors"):
        return f"{_DOCKER}safetensors"
    if base.endswith(".jinja"):
        return f"{_DOCKER}chat.template.jinja"
    return f"{_DOCKER}license" if base.startswith(_DOCS[1:]) else f"{_DOCKER}model.file"


def _config(
    model: _Model, name: ModelName, layers: Sequence[Layer], media_types: MediaTypes
) -> tuple[str, dict[str, Any]]:
    """The media type and the content of the config."""
    digests = [layer.digest for layer in layers]
    size = counted(model.weights)
    quantization = {} if model.file_type == UNKNOWN else {"quantization": model.file_type}
    if media_types == "docker":
        version = "v0.1" if model.kind == "gguf" else "v0.2"
        family = {} if model.family == UNKNOWN else {"architecture": model.family}
        config = {"format": model.kind, **quantization, "parameters": size, **family, "size": _bytes(layers)}
        rootfs = {"type": "rootfs", "diff_ids": digests}
        return f"{_DOCKER}model.config.{version}+json", {"config": config, "descriptor": {}, "rootfs": rootfs}
    descriptor = {"name": name.model, "version": name.tag}
    if model.family != UNKNOWN:
        descriptor["family"] = model.family
    config = {"format": model.kind, "paramSize": _param_size(model.weights), **quantization}
    content = {"descriptor": descriptor, "config": config, "modelfs": {"type": "layers", "diffIds": digests}}
    return f"{_CNCF}config.v1+json", content


def _param_size(n: int) -> str:
    """A count with at most one digit after the point, and the letter of its unit."""
    for unit, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if n >= unit:
            return f"{n / unit:.1f}{letter}".replace(".0", "")
    return f"{n / 1000:.1f}K".replace(".0", "")


def _bytes(layers: Sequence[Layer]) -> str:
    total = float(sum(layer.nbytes for layer in layers))
    for unit in ("B", "KiB", "MiB"):
        if total < 1024:
            return f"{total:.2f}{unit}"
        total /= 1024
    return f"{total:.2f}GiB"


def _manifest(config: Layer, layers: Sequence[Layer], name: ModelName, media_types: MediaTypes) -> dict[str, Any]:
    artifact = {"artifactType": f"{_CNCF}manifest.v1+json"} if media_types == "cncf" else {}
    return {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        **artifact,
        "config": layer_json(config),
        "layers": [layer_json(layer, {layouts.FILE_PATH: layer.name, _TITLE: layer.name}) for layer in layers],
        "annotations": {_TITLE: name.model},
    }


def _refuse_tag(folder: Path, name: ModelName, *, overwrite: bool) -> None:
    """Raise PlanError if the layout has the tag."""
    if not overwrite and layouts.is_layout(folder) and (folder / layouts.INDEX).exists():
        for tagged in layouts.tags(folder):
            if tagged.tag == name.tag:
                raise PlanError(
                    f"target exists: the layout has a model with the tag {printable(name.tag)}",
                    file=folder / layouts.INDEX,
                    hint="choose another tag, or pass --overwrite",
                )


def _add_to_index(folder: Path, entry: dict[str, Any], name: ModelName, *, overwrite: bool) -> None:
    """Add the manifest to index.json, which is replaced by one rename. Other entries are kept."""
    path = folder / layouts.INDEX
    with parent_locked(folder / layouts.BLOBS):  # two runs change the index one after the other
        exists = path.exists()
        empty: dict[str, Any] = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": []}
        index = layouts.index_of(folder) if exists else empty
        _refuse_tag(folder, name, overwrite=overwrite)
        others = [m for m in index["manifests"] if m.get("annotations", {}).get(layouts.TAG) != name.tag]
        write_file(path, _json({**index, "manifests": [*others, entry]}), overwrite=exists)
