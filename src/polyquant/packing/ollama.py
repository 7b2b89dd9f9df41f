"""Write a model into Ollama's store, as `ollama create` does: blobs, then the config, then the manifest by one rename.

    layers   model, projector, adapter, template, system, license, params, messages: each one blob
    config   {"model_format", "model_family", "model_families", "model_type", "file_type", ..., "architecture", "os",
             "rootfs"}; no release reads rootfs, and those from 0.32.10 on do not write it

Sources: server/create.go (CreateHandler, createModel, set*), manifest/layer.go, manifest/manifest.go (WriteManifest),
and types/model/config.go of ollama fb30760; rootfs: server/create.go before 5a173ed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyquant.errors import InputError, PlanError, UnsupportedError, printable
from polyquant.formats.gguf.joined import joined
from polyquant.formats.gguf.reading import open_gguf, sniff
from polyquant.formats.steps import Progress
from polyquant.packing import go_json
from polyquant.packing.chat_template import GoTemplate, go_template
from polyquant.packing.facts import Facts, counted, facts_of
from polyquant.packing.parameters import parameters
from polyquant.packing.request import Contents, Layer, Meter, Packed, layer_json, layer_of
from polyquant.packing.targets import folder_at, free_name, make_folders
from polyquant.runtime.chat import render
from polyquant.storage import strict_json
from polyquant.storage.locations import is_folder
from polyquant.storage.one_file import write_file
from polyquant.storage.pieces import Piece, length
from polyquant.storage.source import Source
from polyquant.storage.stores import ollama as stores
from polyquant.storage.stores.blobs import Blobs, adding, digest_of
from polyquant.storage.stores.manifests import Descriptor, blob_file, small_blob
from polyquant.storage.stores.names import ModelName

__all__ = ["pack_ollama"]

_CONFIG = "application/vnd.docker.container.image.v1+json"
_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_TEXTS = ("template", "system", "params", "messages")
_NEW = 16
"""Most new blobs of one model apart from its licenses."""
_TOKENS = {"bos_token": "tokenizer.ggml.bos_token_id", "eos_token": "tokenizer.ggml.eos_token_id"}


@dataclass(frozen=True, slots=True)
class _Weights:
    """New weights: the pieces of the model, and of a projector and an adapter."""

    facts: Facts
    files: tuple[tuple[str, str, Sequence[Piece]], ...]
    template: str | None
    notes: tuple[str, ...]


def pack_ollama(
    model: Path | ModelName,
    store: Path,
    name: ModelName,
    contents: Contents,
    *,
    link: bool = False,
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Packed:
    """Pack a GGUF model, or a new model from one in the store (a ModelName). Raises PlanError, InputError, OSError."""
    name = name if name.host else name.at(_host(store))
    values, notes = parameters(contents.parameters)
    base = stores.find(store, model) if isinstance(model, ModelName) else None
    weights = _weights(model, contents) if isinstance(model, Path) else None
    _refuse_other_case(store, name)
    target = name.path(store / stores.MANIFESTS)
    free_name(target, overwrite=overwrite, what="model", shown=str(name))
    folder_at(store, (stores.BLOBS, stores.MANIFESTS), "an Ollama model store")
    blobs = store / stores.BLOBS
    make_folders(blobs, store)
    job = f"{name.host}-{name.namespace}-{name.model}-{name.tag}".replace(":", "-")
    meter = Meter(sum(length(p) for *_, p in weights.files) if weights is not None else 0, on_progress)
    licenses = _NEW + len(contents.licenses)
    with adding(blobs, job, licenses, prefix="sha256-", on_bytes=meter) as new:
        layers = _weight_layers(new, weights, meter, link=link) if weights is not None else _kept(base)
        template = contents.template or (weights.template if weights is not None else None)
        layers = _with_texts(new, layers, contents, template, _merged(base, values))
        config = layer_of("config", _CONFIG, new.add_bytes(_config(weights, base, contents, layers)))
        new.publish()
    head = {"schemaVersion": 2, "mediaType": _MANIFEST, "config": layer_json(config)}
    data = go_json.encode({**head, "layers": [layer_json(layer) for layer in layers]})
    make_folders(target.parent, store)
    _refuse_missing(store, [*layers, config])
    write_file(target, data, overwrite=overwrite)
    all_notes = (*notes, *(weights.notes if weights is not None and contents.template is None else ()))
    return Packed(target, store, str(name), f"ollama:{name}", digest_of(data), (*layers, config), all_notes)


def _host(store: Path) -> str:
    host = stores.host_of(store)
    if host is None:
        raise PlanError(
            "the store does not show the host of Ollama's registry, which is part of a model's path", file=store,
            hint="pass --host NAME, the folder in 'manifests' of a store into which Ollama has pulled a model",
        )  # fmt: skip
    return host


def _refuse_other_case(store: Path, name: ModelName) -> None:
    """Raise PlanError if a part of the name is in the store in other letter case: Ollama takes both for the same."""
    for known, _ in stores.models(store):
        parts = [(known.host, name.host), (known.namespace, name.namespace), (known.model, name.model)]
        same = (known.namespace, known.model) == (name.namespace, name.model)
        for part, ours in [*parts, *([(known.tag, name.tag)] if same else [])]:
            if part != ours and part.lower() == ours.lower():
                raise PlanError("the store has this name in other letter case", file=store, expected=part, found=ours)


def _weights(model: Path, contents: Contents) -> _Weights:
    """Open new weights: headers only."""
    if not is_folder(model):
        Source(model).close()  # a missing file
    if sniff(model) is None:
        raise UnsupportedError(
            "Ollama's store has GGUF models", file=model, found="another format",
            hint=f"polyquant convert '{printable(model)}' model.gguf",
        )  # fmt: skip
    checkpoint = open_gguf(model)
    facts = facts_of(checkpoint, checkpoint.metadata)
    if facts.kind in ("adapter", "imatrix"):
        raise InputError(f"is not a model but an {facts.kind}", file=model)
    files = [("model", "model", joined(model))]
    for kind, path in (("projector", contents.projector), ("adapter", contents.adapter)):
        if path is not None:
            if sniff(path) is None:
                raise InputError(f"the {kind} is not a GGUF file", file=path)
            files.append((kind, kind, joined(Path(path))))
    notes = []
    if facts.dialect != "mainline":
        notes.append(f"the file has types of {facts.dialect}, which Ollama's llama.cpp does not read")
    template = None
    if facts.chat_template is not None and contents.template is None:
        found = _go_template(facts.chat_template, checkpoint.metadata)
        template = found.text if isinstance(found, GoTemplate) else None
        if not isinstance(found, GoTemplate):
            notes.append(f"no template layer: {found}; Ollama then uses the chat template in the file")
    return _Weights(facts, tuple(files), template, tuple(notes))


def _go_template(source: str, metadata: Any) -> GoTemplate | str:
    """The Go template of a chat template. The start token is left out if the tokenizer adds it."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    words: dict[str, str] = {}
    for word, key in _TOKENS.items():
        number = metadata.get(key)
        if tokens is not None and isinstance(number, int) and 0 <= number < len(tokens):
            words[word] = str(tokens[number])
    start = words.get("bos_token", "") if metadata.get("tokenizer.ggml.add_bos_token", True) else ""

    def rendered(messages: Sequence[tuple[str, str]], answer: bool) -> str:
        values = {"messages": [{"role": r, "content": c} for r, c in messages], "tools": None, "documents": None}
        return render(source, {**words, **values, "add_generation_prompt": answer}).removeprefix(start)

    return go_template(source, rendered)


def _weight_layers(new: Blobs, weights: _Weights, meter: Meter, *, link: bool) -> list[Layer]:
    layers = []
    for label, kind, pieces in weights.files:
        meter.start(label)
        layers.append(layer_of(label, stores.LAYER + kind, new.add(pieces, link=link)))
    return layers


def _kept(base: stores.StoredModel | None) -> list[Layer]:
    """The layers of the model that a new one starts from. Raises InputError if a blob is missing."""
    assert base is not None
    for blob in (*base.manifest.layers, base.manifest.config):
        blob_file(stores.blob_path(base.store, blob), blob)
    return [
        Layer(blob.media_type.removeprefix(stores.LAYER), blob.media_type, blob.digest, blob.size, "reused")
        for blob in base.manifest.layers
    ]


def _merged(base: stores.StoredModel | None, values: dict[str, Any]) -> dict[str, Any]:
    """Parameters, over those of the model that a new one starts from."""
    for blob in base.layers("params") if base is not None and values else ():
        assert base is not None
        path = stores.blob_path(base.store, blob)
        old = strict_json.typed(strict_json.parse(small_blob(path, blob), file=path), dict, "parameters", file=path)
        values = {**old, **values}
    return dict(sorted(values.items()))


def _with_texts(
    new: Blobs, layers: list[Layer], contents: Contents, template: str | None, values: dict[str, Any]
) -> list[Layer]:
    """Add the small layers in Ollama's order; one of a kind replaces an earlier one, licenses add up."""
    messages = [{"role": role, "content": text} for role, text in contents.messages]
    small = [
        ("template", (template or "").encode()),
        ("system", (contents.system or "").encode()),
        *(("license", text.encode()) for text in contents.licenses),
        ("params", go_json.encode(values) if values else b""),
        ("messages", go_json.encode(messages) if messages else b""),
    ]
    for kind, data in small:
        if data:
            if kind in _TEXTS:
                layers = [x for x in layers if x.media_type != stores.LAYER + kind]
            layers = [*layers, layer_of(kind, stores.LAYER + kind, new.add_bytes(data))]
    return layers


def _config(
    weights: _Weights | None, base: stores.StoredModel | None, contents: Contents, layers: Sequence[Layer]
) -> bytes:
    if weights is not None:
        facts = weights.facts
        config: dict[str, Any] = {
            "model_format": "gguf",
            "model_family": facts.family,
            "model_families": [facts.family],
            "model_type": counted(facts.weights),
            "file_type": facts.file_type,
        }
    else:
        assert base is not None
        config = {k: v for k, v in stores.config_of(base).items() if k not in ("architecture", "os", "rootfs")}
    for key in ("renderer", "parser", "requires"):
        if (value := getattr(contents, key)) is not None:
            config[key] = value
    rootfs = {"type": "layers", "diff_ids": [layer.digest for layer in layers]}
    return go_json.encode({**config, "architecture": "amd64", "os": "linux", "rootfs": rootfs})


def _refuse_missing(store: Path, layers: Sequence[Layer]) -> None:
    """Raise InputError if another program, such as a starting Ollama server, has removed a blob meanwhile."""
    for layer in layers:
        blob = Descriptor(layer.media_type, layer.digest, layer.nbytes)
        blob_file(stores.blob_path(store, blob), blob)
