"""polyquant pack"""

from __future__ import annotations

from pathlib import Path

import click

from polyquant.cli.console import as_json, json_option, progress, size, table, watcher
from polyquant.cli.grouped import GroupedCommand, GroupedOption
from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import say, say_some
from polyquant.errors import printable

_OLLAMA, _OCI = "Ollama's store", "OCI image layout"


def _usual() -> str:
    from polyquant.storage.stores.ollama import usual_store

    return printable(usual_store())


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  polyquant pack model.gguf --ollama ~/.ollama/models --name my-model:q4
  polyquant pack model.gguf --ollama DIR --name my-model --param num_ctx=8192
  polyquant pack --modelfile Modelfile --ollama DIR --name my-model
  polyquant pack model-00001-of-00003.gguf --oci layout/ --name my-model:q4
  polyquant pack hf-folder/ --oci layout/ --name tiny --media-types docker
  polyquant pack --list                        # the models of Ollama's store
  polyquant inspect ollama:my-model:q4
  polyquant run oci:layout:q4 -p 'Hello'""",
)
@click.argument("model", type=SOURCE, required=False)
@click.option("--name", metavar="NAME[:TAG]", help="The name in the store.  [default of TAG: latest]")
@click.option("--ollama", type=click.Path(), metavar="DIR", help="Pack into this Ollama model store.")
@click.option("--oci", type=click.Path(), metavar="DIR", help="Pack into this OCI image layout.")
@click.option("--list", "listing", is_flag=True, help="List the models of a store, by default of this user's Ollama.")
@click.option(
    "--link",
    is_flag=True,
    help="Share the bytes of MODEL's file if the file system can (a clone, else a hard link) instead of copying them.",
)
@click.option("--overwrite", is_flag=True, help="Replace the manifest of an existing NAME:TAG. Blobs are kept.")
@click.option(
    "--host",
    cls=GroupedOption,
    group=_OLLAMA,
    metavar="NAME",
    help="Host of Ollama's registry, a folder in 'manifests'.  [default: that of the store's models]",
)
@click.option(
    "--modelfile",
    cls=GroupedOption,
    group=_OLLAMA,
    type=click.Path(),
    metavar="FILE",
    help="Read FROM, PARAMETER, TEMPLATE, SYSTEM, ADAPTER, LICENSE and MESSAGE from a Modelfile.",
)
@click.option(
    "--param", "parameters", cls=GroupedOption, group=_OLLAMA, multiple=True, metavar="KEY=VALUE",
    help="Set a parameter, e.g. num_ctx=8192 or stop=TEXT. Repeatable.",
)  # fmt: skip
@click.option("--system", cls=GroupedOption, group=_OLLAMA, metavar="TEXT", help="Set the system message.")
@click.option(
    "--template", cls=GroupedOption, group=_OLLAMA, type=click.Path(), metavar="FILE",
    help="Go template of prompts.  [default: from the chat template, if that is exact]",
)  # fmt: skip
@click.option(
    "--license", "licenses", cls=GroupedOption, group=_OLLAMA, type=click.Path(), multiple=True, metavar="FILE",
    help="Add the text of a license. Repeatable.",
)  # fmt: skip
@click.option("--adapter", cls=GroupedOption, group=_OLLAMA, type=SOURCE, metavar="FILE", help="A GGUF file: LoRA.")
@click.option(
    "--projector", cls=GroupedOption, group=_OLLAMA, type=SOURCE, metavar="FILE", help="A GGUF file: image encoder."
)
@click.option(
    "--media-types",
    cls=GroupedOption,
    group=_OCI,
    type=click.Choice(["cncf", "docker"]),
    default="cncf",
    show_default=True,
    help="Media types of the CNCF model specification or of Docker Model Runner.",
)
@json_option
def pack(
    model: str | None,
    name: str | None,
    ollama: str | None,
    oci: str | None,
    listing: bool,
    link: bool,
    overwrite: bool,
    host: str | None,
    modelfile: str | None,
    parameters: tuple[str, ...],
    system: str | None,
    template: str | None,
    licenses: tuple[str, ...],
    adapter: str | None,
    projector: str | None,
    media_types: str,
    style: str,
) -> None:
    """Pack MODEL into Ollama's model store or an OCI image layout.

    Weights keep their bytes; a split GGUF model becomes one file in Ollama's store. Every command then takes
    ollama:NAME[:TAG] (in the store of $OLLAMA_MODELS or ~/.ollama/models), oci:DIR[:TAG], or the path of a manifest.
    """
    if ollama is not None and oci is not None:
        raise click.UsageError("--ollama and --oci are mutually exclusive")
    if listing:
        if model is not None or name is not None:
            raise click.UsageError("--list takes no MODEL and no --name")
        _list(ollama, oci, style)
        return
    if ollama is None and oci is None:
        raise click.UsageError(f"no store: give --oci DIR, or --ollama DIR (the usual store of this user: {_usual()})")
    if name is None:
        raise click.UsageError("no name: give --name NAME[:TAG]")
    from polyquant.packing.pack import pack as packed
    from polyquant.packing.parameters import setting
    from polyquant.packing.text_file import text_of

    values: dict[str, list[str]] = {}
    for key, value in map(setting, parameters):
        values.setdefault(key, []).append(value)
    with progress("packing", "B/s", 1) as tell:
        done = packed(
            model,
            name=name,
            ollama=ollama,
            oci=oci,
            host=host,
            modelfile=modelfile,
            parameters=values or None,
            template=text_of(Path(template)) if template is not None else None,
            system=system,
            licenses=[text_of(Path(file)) for file in licenses],
            adapter=adapter,
            projector=projector,
            media_types=media_types,  # type: ignore[arg-type] # one of the choices
            link=link,
            overwrite=overwrite,
            on_progress=watcher(tell),
        )
    if style == "json":
        as_json(done.to_json())
        return
    rows = table("layer", ">size", "=digest", "how")
    for layer in done.layers:
        rows.add_row(printable(layer.name), size(layer.nbytes), layer.digest[:19], layer.how)
    rows.show()
    say_some(done.notes, "note: ")
    say(f"packed {printable(done.name)} into {printable(done.store)}: {size(done.nbytes)}")


def _list(ollama: str | None, oci: str | None, style: str) -> None:
    from polyquant.packing.listing import stored

    models = stored(ollama=ollama, oci=oci)
    if style == "json":
        as_json([row for model in models for row in model.rows()])
        return
    rows = table("name", ">size", "model", "argument")
    for model in models:
        rows.add_row(
            printable(model.name), size(model.nbytes), printable(model.problem or model.detail),
            printable(model.reference),
        )  # fmt: skip
    rows.show()
    say("1 model" if len(models) == 1 else f"{len(models)} models")
