"""Read OCI image layouts that contain models.

    oci-layout                {"imageLayoutVersion": "1.0.0"}
    index.json                descriptors of manifests; the annotation org.opencontainers.image.ref.name is the tag
    blobs/sha256/HEX          manifests, configs, and each file of a model as one layer

Two sets of media types name the files by annotation: the CNCF model specification (application/vnd.cncf.model.*,
modelpack/model-spec d78bf32) and Docker Model Runner (application/vnd.docker.ai.*, docker/model-runner 642c721), both
org.cncf.model.filepath; ORAS uses org.opencontainers.image.title. Layers that are tar archives are not read.

`oci:DIR[:TAG]` names a model. Source of the layout: opencontainers/image-spec, image-layout.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from polyquant.errors import InputError, UnsupportedError, listed, printable
from polyquant.storage import strict_json
from polyquant.storage.source import opened_files
from polyquant.storage.stored_path import Image, StoredPath, register
from polyquant.storage.stores.manifests import (
    MANIFEST,
    Descriptor,
    Manifest,
    blob_file,
    descriptor,
    manifest,
    small_blob,
)

__all__ = [
    "BLOBS",
    "FILE_PATH",
    "INDEX",
    "LAYOUT",
    "TAG",
    "Tagged",
    "blob_path",
    "chosen",
    "described",
    "files_of",
    "index_of",
    "is_layout",
    "refuse_other",
    "resolve",
    "tags",
]

LAYOUT, INDEX, BLOBS = "oci-layout", "index.json", "blobs"
TAG = "org.opencontainers.image.ref.name"
FILE_PATH = "org.cncf.model.filepath"
_NAMES = (FILE_PATH, "org.opencontainers.image.title")
_MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
_PACKED = (".tar", "+gzip", "+zstd", ".tar+gzip", ".tar+zstd")
_LAYERS = 100_000


@dataclass(frozen=True, slots=True)
class Tagged:
    """A model in a layout. folder: the layout; tag: "" if the index gives it no tag."""

    folder: Path
    tag: str
    descriptor: Descriptor


def is_layout(folder: Path) -> bool:
    """Return True for an OCI image layout."""
    return (folder / LAYOUT).is_file()


def refuse_other(folder: Path) -> None:
    """Raise InputError for a folder that is not a layout."""
    if not is_layout(folder):
        raise InputError("is not an OCI image layout: it has no file 'oci-layout'", file=folder)


def blob_path(folder: Path, blob: Descriptor) -> Path:
    """Return where a layout keeps a blob."""
    return folder / BLOBS / "sha256" / blob.hex


def index_of(folder: Path) -> dict[str, Any]:
    """Return the parsed index.json. Raises InputError."""
    path = folder / LAYOUT
    version = strict_json.typed(strict_json.read(path, MANIFEST), dict, LAYOUT, file=path).get("imageLayoutVersion")
    if version != "1.0.0":
        raise InputError("is another version of the layout", file=path, expected="1.0.0", found=printable(version, 40))
    path = folder / INDEX
    index = strict_json.typed(strict_json.read(path, MANIFEST), dict, INDEX, file=path)
    strict_json.typed(index.get("manifests"), list, "manifests", file=path)
    return index


def tags(folder: Path) -> list[Tagged]:
    """Return the models of a layout, in the order of its index. Raises InputError."""
    path = folder / INDEX
    entries = [descriptor(m, f"manifest {i}", path) for i, m in enumerate(index_of(folder)["manifests"])]
    return [Tagged(folder, entry.annotations.get(TAG, ""), entry) for entry in entries]


def _chosen(folder: Path, tag: str | None) -> Tagged:
    known = tags(folder)
    fits = [t for t in known if tag is None or t.tag == tag]
    if len(fits) == 1:
        return fits[0]
    have = listed(sorted(t.tag for t in known)) if known else "an empty layout"
    if tag is None:
        raise InputError("the layout has several models" if known else "the layout has no model", file=folder,
                         found=have, hint=f"name one: oci:{printable(folder)}:TAG")  # fmt: skip
    raise InputError(f"{'several models have' if fits else 'no model has'} the tag '{printable(tag, 80)}'", file=folder,
                     found=have)  # fmt: skip


def image_manifest(tagged: Tagged) -> Manifest:
    """Read the manifest of a model. Raises InputError."""
    path = blob_path(tagged.folder, tagged.descriptor)
    if tagged.descriptor.media_type not in _MANIFESTS:
        raise UnsupportedError(
            "is not the manifest of one image", file=path, expected=_MANIFESTS[0],
            found=printable(tagged.descriptor.media_type, 80),
        )  # fmt: skip
    content = manifest(strict_json.parse(small_blob(path, tagged.descriptor), MANIFEST, file=path), path)
    if len(content.layers) > _LAYERS:
        raise InputError("has too many layers", file=path, expected=f"at most {_LAYERS}", found=len(content.layers))
    return content


def files_of(tagged: Tagged) -> dict[str, Descriptor]:
    """Return the files of a model: name -> layer. Raises InputError for names that are not plain and relative."""
    path = blob_path(tagged.folder, tagged.descriptor)
    content = image_manifest(tagged)
    out: dict[str, Descriptor] = {}
    folders: set[str] = set()
    for i, layer in enumerate(content.layers):
        if layer.media_type.endswith(_PACKED):
            raise UnsupportedError(
                "a layer is an archive, only plain files are read", file=path, found=printable(layer.media_type, 80),
                hint="pack the model with raw layers",
            )  # fmt: skip
        name = next((layer.annotations[key] for key in _NAMES if key in layer.annotations), None)
        if name is None:
            if len(content.layers) > 1 and not layer.media_type.startswith("application/vnd.docker.ai.gguf"):
                continue  # a license or a template: not a file of the model
            name = "model.gguf"
        above = {str(p) for p in PurePosixPath(name).parents} - {"."}
        if not _plain(name) or name in out or name in folders or above & out.keys():
            raise InputError(f"the name of layer {i} is not valid", file=path, found=printable(name, 80))
        out[name] = layer
        folders |= above
    if not out:
        raise InputError("the image has no files with names: is it a model?", file=path)
    return out


def _plain(name: str) -> bool:
    """Return True for a relative name without special parts."""
    pure = PurePosixPath(name)
    return (
        bool(name) and str(pure) == name and not pure.is_absolute() and ".." not in pure.parts
        and "\0" not in name and len(name) <= 1024 and len(pure.parts) <= 8
    )  # fmt: skip


def _split(reference: str) -> tuple[Path, str | None, list[str]]:
    """Split "oci:DIR[:TAG][/FILE]". Raises InputError if no beginning of it is a layout."""
    parts = reference.partition(":")[2].split("/")
    for n in range(len(parts), 0, -1):
        whole = "/".join(parts[:n])
        if is_layout(Path(whole or "/")):
            return Path(whole or "/"), None, parts[n:]
        folder, colon, tag = whole.rpartition(":")
        if colon and is_layout(Path(folder)):
            return Path(folder), tag, parts[n:]
    raise InputError(
        "is not an OCI image layout: it has no file 'oci-layout'", file=reference.partition(":")[2],
        hint="write oci:DIR or oci:DIR:TAG",
    )  # fmt: skip


def chosen(reference: str) -> Tagged:
    """Return the model of "oci:DIR[:TAG]". Raises InputError."""
    folder, tag, _ = _split(reference)
    return _chosen(folder, tag)


def resolve(reference: str) -> StoredPath:
    """Return the path of "oci:DIR[:TAG][/FILE]": of a single file or of the first shard of a GGUF model the file, else
    the folder of its files. Raises InputError.
    """
    folder, tag, inside = _split(reference)
    with opened_files():  # manifests are not files of the model
        tagged = _chosen(folder, tag)
        files = files_of(tagged)
    blobs = {name: str(blob_file(blob_path(folder, layer), layer)) for name, layer in files.items()}
    real = folder.absolute()
    root = register(f"oci:{real}:{tagged.tag}" if tagged.tag else f"oci:{real}", Image(str(real), blobs))
    if inside:
        return root.joinpath(*inside)
    first = _entry(blobs)
    return root if first is None else root / first


def _entry(files: Mapping[str, str]) -> str | None:
    """The file that opens the model: the only one with weights, or the first shard of a GGUF model."""
    if len(files) == 1:
        return next(iter(files))
    gguf = sorted(name for name in files if name.lower().endswith(".gguf"))
    if gguf and not any(name.endswith(".safetensors") for name in files):
        return gguf[0]
    return None


def described(tagged: Tagged) -> dict[str, str]:
    """Return the tag and the config's media type, for display. Raises InputError."""
    content = image_manifest(tagged)
    return {
        "store": str(tagged.folder),
        "tag": printable(tagged.tag or "(none)", 80),
        "media type": printable(content.config.media_type, 80),
    }
