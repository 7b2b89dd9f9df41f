"""polyquant eval"""

from __future__ import annotations

import math
import sys

import click

from polyquant.analysis.evaluate import Divergence, Evaluation, LayerError, Mean, Score, evaluate
from polyquant.cli.console import (
    activations_option,
    as_json,
    cache_option,
    json_option,
    paragraph,
    progress,
    size,
    table,
    watcher,
)
from polyquant.cli.option_flags import source_option
from polyquant.cli.slow_engine import note_slow_engine
from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import say, say_some
from polyquant.errors import printable
from polyquant.runtime.kv_cache import CacheType
from polyquant.runtime.load import Activations

_BAR = 24
_EIGHTHS = " ▏▎▍▌▋▊▉"


@click.command(
    name="eval",
    epilog="""\b
Examples:
  polyquant eval model.gguf --text wiki.test.raw
  polyquant eval model-q4_k_m.gguf --text wiki.test.raw --against hf-folder/
  polyquant eval model.gguf --text book.txt --stride 256 --format json""",
)
@click.argument("path", type=SOURCE)
@click.option("--text", required=True, type=click.Path(), help="UTF-8 evaluation text, not seen in training.")
@click.option(
    "--against",
    metavar="OTHER",
    type=SOURCE,
    help="Reference model with the same vocabulary, e.g. the unquantized model.",
)
@click.option(
    "--context", type=click.IntRange(4), help="Tokens per window.  [default: the model's context, at most 512]"
)
@click.option(
    "--stride",
    type=click.IntRange(1),
    help="Slide the window by N tokens and score every token.  [default: adjacent windows, second half scored]",
)
@click.option("--tokens", type=click.IntRange(2), help="Use only the first N tokens of the text.")
@activations_option
@cache_option
@source_option("ternary_layout")
@source_option("ternary_layout", flag="--against-layout", help="The same for OTHER.")
@source_option("tile")
@json_option
def eval(
    path: str,
    text: str,
    against: str | None,
    context: int | None,
    stride: int | None,
    tokens: int | None,
    activations: Activations,
    cache: CacheType | None,
    ternary_layout: str | None,
    against_layout: str | None,
    tile: tuple[int, int, int] | None,
    style: str,
) -> None:
    """Measure perplexity on an evaluation text; with --against also KL divergence, agreement and the error of every
    layer.
    """
    note_slow_engine()
    try:
        with progress("evaluating", "tokens/s", 1) as tell:
            result = evaluate(
                path,
                text=text,
                against=against,
                context=context,
                stride=stride,
                tokens=tokens,
                activations=activations,
                cache=cache,
                ternary_layout=ternary_layout,
                against_layout=against_layout,
                tile=tile,
                on_progress=watcher(tell),
            )
    except KeyboardInterrupt:
        say("polyquant: interrupted", err=True)
        sys.exit(130)
    if style == "json":
        as_json(result.to_json())
        return
    _print(result)


def _print(result: Evaluation) -> None:
    how = (
        "second half of each scored, as llama.cpp's perplexity tool does"
        if result.stride is None
        else f"sliding by {result.stride}, every token scored"
    )
    paragraph(
        f"{result.windows} window{'' if result.windows == 1 else 's'} of {result.context} tokens",
        how,
        f"{result.model.tokens} tokens scored",
        f"activations {result.activations}",
        f"cache {result.model.cache}",
    )
    say()
    models = [m for m in (result.model, result.reference) if m is not None]
    shown = table("model", ">size", ">bpw", ">perplexity", ">nats/token", ">bits/byte")
    for m in models:
        shown.add_row(
            printable(m.path),
            size(m.nbytes),
            f"{m.bpw:.3f}",
            _mean(m.perplexity),
            _mean(m.nll),
            f"{m.bits_per_byte:.4f}",
        )
    shown.show()
    say_some(dict.fromkeys(note for m in models for note in m.notes), "note: ")
    if result.reference is not None and result.divergence is not None:
        say()
        _print_divergence(result.model, result.reference, result.divergence)


def _print_divergence(model: Score, reference: Score, result: Divergence) -> None:
    ratio = result.log_ratio
    rows = {
        "perplexity": f"{model.perplexity.value - reference.perplexity.value:+.4f}, {math.expm1(ratio.value):+.3%} ± "
        f"{100 * ratio.error:.3f}%",
        "KL divergence": f"mean {result.kl.value:.6f} ± {result.kl.error:.6f}, 99% below {result.kl_99:.6f}, max "
        f"{result.kl_max:.4f} nats",
        "same first choice": f"{result.top_1.value:.2%} ± {100 * result.top_1.error:.2f}%",
        "correct token": f"its probability changes by {result.probability_rms:.3%} (RMS)",
        "size": f"{model.nbytes / max(1, reference.nbytes):.1%} of the reference",
    }
    for name, value in rows.items():
        say(f"{name:18} {value}")
    say()
    if result.layers:
        _print_layers(result.layers)
    else:
        say("layers are not compared: the models differ in number or width of layers")


def _print_layers(layers: tuple[LayerError, ...]) -> None:
    top = max(layer.alone for layer in layers)
    shown = table("layer", ">output error", ">own error", "")
    for layer in layers:
        shown.add_row(
            layer.name, f"{layer.output:.5f}", f"{layer.alone:.5f}", _bar(layer.alone / top if top > 0 else 0.0)
        )
    shown.show()


def _bar(share: float) -> str:
    """A bar in eighths of a character; empty for 0."""
    if not math.isfinite(share):
        return "?"
    full, eighths = divmod(round(8 * _BAR * share), 8)
    return ("█" * full + _EIGHTHS[eighths]).rstrip()


def _mean(x: Mean) -> str:
    """Four decimals, so that similar models can be distinguished; fewer for large values."""
    digits = 4 if abs(x.value) < 1000 else 1
    return f"{x.value:.{digits}f} ± {x.error:.{digits}f}" if abs(x.value) < 1e7 else f"{x.value:.4g}"
