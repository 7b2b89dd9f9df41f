"""Read Ollama's model store.

    manifests/HOST/NAMESPACE/MODEL/TAG     JSON, see manifests.py; the host is that of the registry of the model's name
    blobs/sha256-HEX                       layers and configs, shared by the models

Source: manifest/paths.go, manifest/manifest.go and server/images.go (GetModel) of ollama fb30760. `ollama:NAME` names a
model in the store of $OLLAMA_MODELS, by default ~/.ollama/models.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyquant.errors import InputError, PlanError, UnsupportedError, listed, printable
from polyquant.storage import strict_json
from polyquant.storage.source import opened_files
from polyquant.storage.stores.manifests import MANIFEST, Descriptor, Manifest, blob_file, manifest, small_blob
from polyquant.storage.stores.names import LIBRARY, ModelName, parse_name

__all__ = [
    "BLOBS",
    "LAYER",
    "MANIFESTS",
    "StoredModel",
    "blob_path",
    "config_of",
    "described",
    "find",
    "host_of",
    "is_manifest",
    "models",
    "read",
    "refuse_other",
    "resolve",
    "stored_model",
    "usual_store",
    "weights",
]

MANIFESTS, BLOBS = "manifests", "blobs"
LAYER = "application/vnd.ollama.image."
"""Media types of layers: LAYER + "model", "template", ..."""
_MOST_MODELS = 10_000
_TEXTS = ("template", "system", "params", "messages")
_FILES = ("projector", "adapter", "draft")
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in a store. store: its folder; path: its manifest."""

    store: Path
    name: ModelName
    path: Path
    manifest: Manifest

    def layers(self, kind: str) -> list[Descriptor]:
        """The layers of one kind, such as "model" or "template"."""
        return [layer for layer in self.manifest.layers if layer.media_type == LAYER + kind]


def usual_store() -> Path:
    """The store of this user: $OLLAMA_MODELS, or ~/.ollama/models."""
    chosen = os.environ.get("OLLAMA_MODELS", "").strip().strip("\"'")
    return Path(chosen) if chosen else Path.home() / ".ollama/models"


def blob_path(store: Path, blob: Descriptor) -> Path:
    """Return where a store keeps a blob."""
    return store / BLOBS / f"sha256-{blob.hex}"


def read(store: Path, name: ModelName) -> StoredModel:
    """Read the manifest of a model. Raises InputError."""
    path = name.path(store / MANIFESTS)
    return StoredModel(store, name, path, manifest(strict_json.read(path, MANIFEST), path))


def models(store: Path) -> Iterator[tuple[ModelName, Path]]:
    """Yield the names in a store with their manifests, sorted; a store may have 10,000. Raises InputError."""
    found = 0
    for path in _walk(store / MANIFESTS, 4):
        with suppress(PlanError):
            host, namespace, model, tag = path.parts[-4:]
            name = parse_name(f"{host}/{namespace}/{model}:{tag}")
            found += 1
            if found > _MOST_MODELS:
                raise InputError("too many models in the store", file=store, expected=f"at most {_MOST_MODELS}")
            yield name, path


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the files at this depth below a folder."""
    with suppress(OSError):
        for path in sorted(folder.iterdir()):
            if depth > 1 and path.is_dir():
                yield from _walk(path, depth - 1)
            elif depth == 1 and path.is_file():
                yield path


def host_of(store: Path) -> str | None:
    """Return the host of names without one, as the models of a store show it; None if they do not.

    Ollama adds its own registry's host to a short name, in the namespace "library". A store shows it by its folders: it
    is the only host, or the only one with that namespace.
    """
    hosts = {name.host: name.namespace for name, _ in models(store)}
    official = {name.host for name, _ in models(store) if name.namespace == LIBRARY}
    for candidates in (official, set(hosts)):
        if len(candidates) == 1:
            return next(iter(candidates))
    return None


def refuse_other(store: Path) -> None:
    """Raise InputError for a folder that is not a store."""
    if not (store / MANIFESTS).is_dir():
        raise InputError(
            "is not an Ollama model store: it has no folder 'manifests'", file=store,
            hint="set OLLAMA_MODELS to the store's folder, or name a manifest by its path",
        )  # fmt: skip


def find(store: Path, name: ModelName) -> StoredModel:
    """Find a model by its name; without a host, in the folders of all hosts. Raises InputError."""
    refuse_other(store)
    known = dict(models(store))
    fits = [n for n in known if n == name or (not name.host and n == replace(name, host=n.host))]
    if len(fits) > 1 and (host := host_of(store)) is not None:
        fits = [n for n in fits if n.host == host]
    if len(fits) == 1:
        return read(store, fits[0])
    if fits:
        raise InputError(
            f"several models are called '{name}'", file=store, found=listed(map(str, fits)),
            hint="name it with its host: ollama:HOST/NAMESPACE/MODEL:TAG",
        )  # fmt: skip
    near = [str(n) for n in known if n.model == name.model] or [str(n) for n in known]
    raise InputError(
        f"no model '{name}' in this store", file=store,
        found=listed(near) if near else "an empty store",
        hint="`polyquant pack --list --ollama DIR` lists the models",
    )  # fmt: skip


def weights(model: StoredModel) -> Path:
    """Return the blob with the model's weights. Raises InputError; UnsupportedError for a model of several blobs."""
    found = model.layers("model")
    if len(found) == 1:
        return blob_file(blob_path(model.store, found[0]), found[0])
    if not found and model.layers("tensor"):
        raise UnsupportedError(
            "the model is stored as one blob per tensor, which only Ollama's own runner reads", file=model.path
        )
    if not found:
        raise InputError("the model has no weights", file=model.path, hint="is it a model in a cloud?")
    raise UnsupportedError("the model has several layers of weights", file=model.path, found=len(found))


def is_manifest(path: Path) -> bool:
    """Return True for the path of a manifest in a store."""
    return (
        path.parts[-5:-4] == (MANIFESTS,)
        and not path.parts[-1].endswith((".gguf", ".json", ".safetensors"))
        and path.is_file()
        and (path.parents[4] / BLOBS).is_dir()
    )


def resolve(reference: str | Path) -> Path:
    """Return the weights of "ollama:NAME", or of the path of a manifest. Raises InputError, PlanError."""
    with opened_files():  # the manifest is not a file of the model
        return weights(stored_model(reference))


def stored_model(reference: str | Path) -> StoredModel:
    """Read the manifest of "ollama:NAME", or of the path of a manifest. Raises InputError, PlanError."""
    if isinstance(reference, str):
        return find(usual_store(), parse_name(reference.partition(":")[2]))
    host, namespace, model, tag = reference.parts[-4:]
    return read(reference.parents[4], parse_name(f"{host}/{namespace}/{model}:{tag}"))


def described(model: StoredModel) -> dict[str, str]:
    """Return the name of a model and its layers other than weights, for display. Raises InputError."""
    out = {"store": str(model.store), "name": str(model.name)}
    for kind in (*_TEXTS, "license"):
        for layer in model.layers(kind):
            text = small_blob(blob_path(model.store, layer), layer).decode("utf-8", "replace")
            out[kind] = printable(" ".join(text.split()), _SHOWN)
    for kind in _FILES:
        for layer in model.layers(kind):
            out[kind] = str(blob_file(blob_path(model.store, layer), layer))
    return out


def config_of(model: StoredModel) -> dict[str, Any]:
    """Return the parsed config of a model. Raises InputError."""
    path = blob_path(model.store, model.manifest.config)
    content = strict_json.parse(small_blob(path, model.manifest.config), MANIFEST, file=path)
    return strict_json.typed(content, dict, "config", file=path)
