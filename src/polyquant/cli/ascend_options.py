"""Options of `convert` and `quantize` that only an msModelSlim folder has."""

from __future__ import annotations

import click

__all__ = ["ASCEND_OPTIONS"]

ASCEND_OPTIONS = (
    click.option(
        "--dialect",
        type=click.Choice(["v1", "ascendv1", "v0"]),
        help="msModelSlim: files as its current command line writes them, or one of its two older forms.  [default: v1]",
    ),
    click.option(
        "--keep",
        multiple=True,
        metavar="GLOB|auto",
        help="msModelSlim: linear layers that stay float; repeatable. auto: as few as keep the model within --keep-error; needs --calibration.",
    ),
    click.option(
        "--keep-error",
        type=click.FloatRange(0, min_open=True),
        metavar="X",
        help="msModelSlim: limit of --keep auto: mean KL divergence of the next token, in nats.  [default: 0.01]",
    ),
    click.option(
        "--ranges",
        type=click.Path(),
        metavar="FILE",
        help="msModelSlim: w8a8 without a calibration: JSON {linear layer: [least, greatest input]}, or the tool's calib_stats.json.",
    ),
    click.option(
        "--kv",
        type=click.Choice(["c8", "c8.asym"]),
        help="msModelSlim: scales for a cache of int8, with offsets or without; needs --calibration.",
    ),
    click.option(
        "--smooth",
        type=click.Choice(["m1", "m4", "shift"]),
        help="msModelSlim: let norms and weights share what makes inputs hard to round: SmoothQuant with exponent 0.5, with 0.9 between more layers, or with "
        "inputs centred too; needs --calibration.",
    ),
    click.option(
        "--exact-tool",
        is_flag=True,
        help="msModelSlim: the tool's integers bit for bit, computed in the model's type; its error is larger.",
    ),
)
