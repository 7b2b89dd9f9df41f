"""polyquant compare"""

from __future__ import annotations

from dataclasses import asdict

import click

from polyquant.analysis.compare import Comparison
from polyquant.analysis.compare import compare as run
from polyquant.analysis.headers import HeaderComparison, compare_headers
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
from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import say
from polyquant.errors import listed, printable


@click.command(
    epilog="""\b
Examples:
  polyquant compare hf-folder/ model.gguf
  polyquant compare a.gguf b.gguf --sort error --format json
  polyquant compare hf-folder/ w8a8/ --text book.txt    # outputs, by layer
  polyquant compare hf://org/model model.gguf --headers # shapes and types""",
)
@click.argument("a", type=SOURCE)
@click.argument("b", type=SOURCE)
@click.option(
    "--sort",
    type=click.Choice(["file", "error"]),
    default="file",
    show_default=True,
    help="Order of tensors: as in the file, or worst first.",
)
@click.option("--limit", type=click.IntRange(0), default=0, help="Show at most N tensors; 0: all.")
@source_option("ternary_layout")
@source_option("ternary_layout", flag="--a-layout", help="The same for A.")
@source_option("tile")
@click.option(
    "--repair", is_flag=True, help="B is a Metal Marlin Trellis folder: undo its quantizer's bugs before comparing."
)
@click.option(
    "--axes",
    type=click.Choice(["kn", "nk"]),
    help="Tile order of a Trellis folder B, if its files do not show it.",
)
@click.option(
    "--text",
    metavar="FILE",
    help="Run both on this text and show the error of each layer's outputs. B runs with the integer activations and "
    "caches of its format.",
)
@click.option("--headers", is_flag=True, help="Compare names, shapes, codecs and metadata; do not read the data.")
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
    headers: bool,
    style: str,
) -> None:
    """Measure the error of B against A, tensor by tensor: SNR (dB), cosine, largest error, share of equal codes.

    With --text: the errors of the outputs, layer by layer.
    """
    if text is not None:
        _outputs(a, b, text, style)
        return
    if headers:
        _headers(compare_headers(a, b, ternary_layout=ternary_layout, a_layout=a_layout, tile=tile), limit, style)
        return
    with progress("comparing") as tell:
        result = run(
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
        as_json(result.to_json())
        return
    _print(result, sort, limit)


def _print(result: Comparison, sort: str, limit: int) -> None:
    tensors = sorted(result.tensors, key=lambda t: t.error.snr) if sort == "error" else list(result.tensors)
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
    e = result.error
    say()
    paragraph(
        f"{len(result.tensors)} tensors, {result.bpw:.3f} effective bits per weight in B",
        f"total SNR {decibel(e.snr)} dB, relative RMSE {e.rrmse:.5f}, cosine {e.cosine:.6f}",
    )
    _say_alone(result)


def _headers(result: HeaderComparison, limit: int, style: str) -> None:
    """Print tensors whose shapes or codecs differ, and names and metadata keys of one side."""
    if style == "json":
        as_json(result.to_json())
        return
    differing = [t for t in result.tensors if not t.fits or t.a != t.b]
    t = table("tensor", "a", "b", "shape in a", "shape in b")
    for x in differing[: limit or None]:
        shapes = ["x".join(map(str, shape)) for shape in (x.a_shape, x.b_shape)]
        t.add_row(printable(x.name), x.a, x.b, shapes[0], "" if x.fits else shapes[1])
    if differing:
        t.show()
        say()
    paragraph(
        f"{len(result.tensors)} tensors, {len(result.misfits)} of different shapes",
        f"{sum(x.a != x.b for x in result.tensors)} of different types; data not read",
    )
    _say_alone(result)
    if result.metadata:
        say(f"metadata that differs: {listed(result.metadata, 8)}")


def _say_alone(result: Comparison | HeaderComparison) -> None:
    """Print the names that only one side has."""
    for side, names in (("A", result.only_a), ("B", result.only_b)):
        if names:
            say(f"only in {side}: {listed(names)}")


def _outputs(a: str, b: str, text: str, style: str) -> None:
    """Print the errors of the outputs: a row per layer, a column per linear layer."""
    with progress("layers", "%", 1) as tell:
        result = compare_outputs(a, b, text, tick=lambda share: tell(int(100 * share), 100, "outputs"))
    if style == "json":
        as_json([asdict(layer) for layer in result])
        return
    columns = list(dict.fromkeys(_short(name) for layer in result for name in layer.linears))
    t = table(">layer", *(f">{printable(c)}" for c in columns), ">all")
    for layer in result:
        shown = {_short(n): f"{e.error:.4f}{'*' if e.scaled else ''}" for n, e in layer.linears.items()}
        t.add_row(str(layer.index), *(shown.get(c, "-") for c in columns), f"{layer.layer:.4f}")
    t.show()
    say()
    worst = max(result, key=lambda layer: layer.layer)
    notes = [
        "relative errors of outputs on the inputs of the float model",
        f"worst layer: {worst.index}, {worst.layer:.4f} of its contribution to the residual stream",
    ]
    if any(e.scaled for layer in result for e in layer.linears.values()):
        notes.append("* up to a factor per channel, which smoothing introduced")
    paragraph(*notes)


def _short(name: str) -> str:
    """The linear layer's short name, such as "q_proj" or "attn_q"."""
    return name.removesuffix(".weight").rpartition(".")[2].removesuffix("_proj")
