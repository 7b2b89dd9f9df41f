"""Pack a model into a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from polyquant.errors import InputError, PlanError, printable
from polyquant.formats.progress import shows_progress
from polyquant.formats.steps import Progress
from polyquant.packing import modelfile as modelfiles
from polyquant.packing.oci import MediaTypes, pack_oci
from polyquant.packing.ollama import pack_ollama
from polyquant.packing.request import Contents, Packed
from polyquant.storage.locations import located
from polyquant.storage.stores.names import ModelName, parse_name

__all__ = ["Setting", "pack"]

StrPath = str | os.PathLike[str]
Setting = str | int | float | bool | Sequence[str]
"""A parameter's value; several strings for `stop`."""
_ONLY_OLLAMA = ("host", "modelfile", "parameters", "template", "system", "licenses", "adapter", "projector")


@shows_progress("pack")
def pack(
    model: StrPath | None = None,
    *,
    name: str,
    ollama: StrPath | None = None,
    oci: StrPath | None = None,
    host: str | None = None,
    modelfile: StrPath | None = None,
    parameters: Mapping[str, Setting] | None = None,
    template: str | None = None,
    system: str | None = None,
    licenses: Sequence[str] = (),
    adapter: StrPath | None = None,
    projector: StrPath | None = None,
    media_types: MediaTypes = "cncf",
    link: bool = False,
    overwrite: bool = False,
    progress: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Packed:
    """Pack a model into Ollama's store (ollama: its folder) or an OCI image layout (oci: its folder).

    model: a path or a URL; with `modelfile`, its FROM line by default. A split GGUF model becomes one file in Ollama's
    store and stays split in a layout. name: NAME[:TAG]. host: the registry's host in the path of a manifest, by default
    the one of the store's models. parameters, template, system, licenses (strings), adapter, projector: take precedence
    over those of the Modelfile. link: share the bytes of the source if its file system can, else copy them; an edit of
    the source by other programs then changes a hard-linked blob. overwrite: replace the manifest of an existing name;
    blobs are never replaced. progress: draw a bar; on_progress: called while files are copied.

    Raises PlanError for an existing name and for options of the other kind of store, InputError for broken files and
    damaged stores, UnsupportedError if the store does not take the model's format, OSError.
    """
    if (ollama is None) == (oci is None):
        raise PlanError("exactly one store is needed", hint="--ollama DIR or --oci DIR")
    given = {"host": host, "modelfile": modelfile, "parameters": parameters, "template": template, "system": system,
             "licenses": licenses or None, "adapter": adapter, "projector": projector}  # fmt: skip
    if oci is not None:
        if wrong := [n for n in _ONLY_OLLAMA if given[n] is not None]:
            raise PlanError(f"{wrong[0]} applies to Ollama's store only", hint="an OCI layout has the model's files")
        if model is None:
            raise PlanError("no model is given")
        target = Path(oci)
        return pack_oci(located(model), target, _tagged(name), media_types=media_types, link=link, overwrite=overwrite,
                        on_progress=on_progress)  # fmt: skip
    assert ollama is not None
    if media_types != "cncf":
        raise PlanError("media_types applies to OCI layouts only")
    read = modelfiles.read(Path(modelfile)) if modelfile is not None else modelfiles.Modelfile()
    contents = Contents(
        template=template if template is not None else read.template,
        system=system if system is not None else read.system,
        licenses=(*read.licenses, *licenses),
        parameters=(*_unless(read.parameters, parameters or {}), *_texts(parameters or {})),
        messages=read.messages,
        adapter=os.fspath(adapter) if adapter is not None else read.adapter,
        projector=os.fspath(projector) if projector is not None else None,
        renderer=read.renderer,
        parser=read.parser,
        requires=read.requires,
    )
    named = parse_name(name)
    if host is not None:
        named = named.at(host) if not named.host else named
    source = _source(model, read.model, modelfile)
    return pack_ollama(source, Path(ollama), named, contents, link=link, overwrite=overwrite, on_progress=on_progress)


def _tagged(name: str) -> ModelName:
    """A name in a layout, which has tags but no hosts. Raises PlanError."""
    parsed = parse_name(name)
    if "/" in name:
        raise PlanError(
            "a name in an OCI layout has no host and no namespace", found=printable(name), expected="NAME[:TAG]"
        )
    return replace(parsed, namespace="")


def _unless(given: Sequence[tuple[str, str]], later: Mapping[str, Setting]) -> list[tuple[str, str]]:
    """The parameters of a Modelfile that are not given otherwise."""
    return [(key, text) for key, text in given if key not in later]


def _texts(values: Mapping[str, Setting]) -> list[tuple[str, str]]:
    """Parameters as a Modelfile writes them."""
    out = []
    for key, value in values.items():
        several = [value] if isinstance(value, str | int | float) else list(value)
        out += [(key, str(v).lower() if isinstance(v, bool) else str(v)) for v in several]
    return out


def _source(model: StrPath | None, inside: str | None, modelfile: StrPath | None) -> Path | ModelName:
    """The model to pack: a path, or the name of a model in the store, as in FROM."""
    if model is not None:
        return located(model)
    if inside is None:
        raise PlanError("no model is given", hint="name a GGUF file, or a Modelfile with --modelfile")
    if os.path.lexists(inside):
        return located(inside)
    assert modelfile is not None
    text = os.path.relpath(inside, Path(modelfile).parent)
    if text.startswith((".", "/")) or text.lower().endswith(".gguf"):
        raise InputError("the file of the FROM line does not exist", file=modelfile, found=printable(inside))
    return parse_name(text)
