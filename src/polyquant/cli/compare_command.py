"""polyquant compare"""

from __future__ import annotations

from dataclasses import asdict

import click

from polyquant.analysis.compare import Comparison
from polyquant.analysis.compare import compare as run
from polyquant.analysis.outputs import compare_outputs
from polyquant.cli.console import (
    as_json,
    decibel,
    json_option,
    paragraph,
    progress,
    table,
    watcher,
)
from polyquant.cli.option_flags import source_option
from polyquant.cli.terminal import say
from polyquant.errors import listed, printable


@click.command(
    epilog="""\b
Examples:
  polyquant compare hf-folder/ model.gguf
  polyquant compare a.gguf b.gguf --sort error --format json
  polyquant compare hf-folder/ w8a8/ --text book.txt    # outputs, by layer""",
)
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option(
    "--sort",
    type=click.Choice(["file", "error"]),
    default="file",
    show_default=True,
    help="Order of the tensors: as in the file, or worst first.",
)
@click.option("--limit", type=click.IntRange(0), default=0, help="Show only so many tensors; 0: all.")
@source_option("ternary_layout")
@source_option("ternary_layout", flag="--a-layout", help="The same for A.")
@source_option("tile")
@click.option("--repair", is_flag=True, help="B is Metal Marlin's Trellis: compare what its quantizer meant.")
@click.option(
    "--axes",
    type=click.Choice(["kn", "nk"]),
    help="How the tiles of a Trellis folder B lie, where it does not show it.",
)
@click.option(
    "--text",
    metavar="FILE",
    help="Run both on this text and show the error of each layer's outputs, B with the integers and caches of its format.",
)
@json_option
def compare(
    a: str,
    b: str,
    sort: str,
    limit: int,
    ternary_layout: str | None,
    a_layout: str | None,
    tile: tuple[int, int, int] | None,
    repair: bool,
    axes: str | None,
    text: str | None,
    style: str,
) -> None:
    """How far is B from A, tensor by tensor: SNR (dB), cosine, largest error, share of equal codes; totals. With --text: layer by layer, on its outputs."""
    if text is not None:
        _outputs(a, b, text, style)
        return
    with progress("comparing") as tell:
        found = run(
            a,
            b,
            on_progress=watcher(tell),
            ternary_layout=ternary_layout,
            a_layout=a_layout,
            tile=tile,
            repair=repair,
            axes=axes,
        )
    if style == "json":
        as_json(found.to_json())
        return
    _print(found, sort, limit)


def _print(found: Comparison, sort: str, limit: int) -> None:
    tensors = sorted(found.tensors, key=lambda t: t.error.snr) if sort == "error" else list(found.tensors)
    t = table("tensor", "a", "b", ">SNR dB", ">cosine", ">max err", ">codes =")
    for x in tensors[: limit or None]:
        share = "" if x.equal_codes is None else f"{x.equal_codes:.2%}"
        t.add_row(
            printable(x.name),
            x.a,
            x.b,
            decibel(x.error.snr),
            f"{x.error.cosine:.5f}",
            f"{x.error.worst:.2g}",
            share,
        )
    t.show()
    e = found.error
    say()
    paragraph(
        f"{len(found.tensors)} tensors, {found.bpw:.3f} effective bits per weight in B",
        f"total SNR {decibel(e.snr)} dB, relative RMSE {e.rrmse:.5f}, cosine {e.cosine:.6f}",
    )
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            say(f"only in {side}: {listed(names)}")


def _outputs(a: str, b: str, text: str, style: str) -> None:
    """Errors of the outputs: a line for each layer, a column for each of its linear layers."""
    with progress("layers", "%", 1) as tell:
        found = compare_outputs(a, b, text, tick=lambda share: tell(int(100 * share), 100, "outputs"))
    if style == "json":
        as_json([asdict(layer) for layer in found])
        return
    columns = list(dict.fromkeys(_short(name) for layer in found for name in layer.linears))
    t = table(">layer", *(f">{printable(c, 16)}" for c in columns), ">whole")
    for layer in found:
        shown = {_short(n): f"{e.error:.4f}{'*' if e.scaled else ''}" for n, e in layer.linears.items()}
        t.add_row(str(layer.index), *(shown.get(c, "-") for c in columns), f"{layer.layer:.4f}")
    t.show()
    say()
    worst = max(found, key=lambda layer: layer.layer)
    notes = [
        "relative errors of outputs on the inputs of the float model",
        f"worst layer: {worst.index}, {worst.layer:.4f} of what it adds",
    ]
    if any(e.scaled for layer in found for e in layer.linears.values()):
        notes.append("* beside a factor for each channel, which smoothing put there")
    paragraph(*notes)


def _short(name: str) -> str:
    """The linear layer's own name: "q_proj" or "attn_q", without what all share."""
    return name.removesuffix(".weight").rpartition(".")[2].removesuffix("_proj")
