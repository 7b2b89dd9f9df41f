"""Write docs/howto: a page for each pair of formats, with the effect of a conversion on each codec.

PYTHONPATH=src python scripts/howto_pages.py

The classes are those of the planner: `formats.actions.action_of` for every codec that a format reads and every codec
that the other one writes, and for examples the plan of a small model.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import polyquant as pq
from polyquant import registry
from polyquant.capabilities import MaybeIntegers, claims
from polyquant.cli.option_flags import writable
from polyquant.codecs.affine_forms import exact_msmodelslim
from polyquant.codecs.trellis_forms import exact_trellis
from polyquant.errors import CodecError, PolyquantError
from polyquant.formats.actions import action_of
from polyquant.formats.protocol import DeclaresCodecs
from polyquant.options import options_of
from polyquant.rows import in_memory
from polyquant.types import Action, Codec, TensorMap, TrellisCodes, Weight

__all__ = ["CLASSES", "example", "outcome", "pages", "samples"]

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "tests/vectors/models/tiny-llama-tied/hf"
SHAPE = (512, 1024)
"""A matrix that the blocks of all codecs divide."""
FILLS = (0x00, 0x77, 0x88)
"""Bytes of stored integers: for each way to store offsets, one of them means that there are none."""
CLASSES = {
    Action.COPY: "copied",
    Action.TRANSCODE: "equal codes",
    Action.QUANTIZE: "quantized",
    Action.DEQUANTIZE: "dequantized",
    Action.REQUANTIZE: "requantized",
}
_EXPLAINED = """\
| class | the values | allowed |
|---|---|---|
| copied | equal: the bytes are moved | always |
| equal codes | equal codes in a different layout; at most a scale or a float is rounded, which is reported | always |
| dequantized | those of the source, rounded to the float type | always |
| quantized | floats to codes; the error of each tensor is measured and printed | with a recipe, a codec or `--bits` |
| requantized | codes to other codes; the error is measured and printed | only with `--requantize` |
"""
_PAGES = {"gguf": "gguf", "hf": "huggingface", "trellis-v3": "trellis", "msmodelslim": "msmodelslim"}
_DST = {"gguf": "model.gguf"}
_SAMPLES = {
    "gguf": ("bf16", "q8_0", "q4_k"),
    "hf": ("bf16",),
    "trellis-v3": ("trellis.4.grid",),
    "msmodelslim": ("w8a16", "w8a8.dynamic"),
}
"""Codecs of the matrices in the examples of each source."""


_MORE = ("trellis.3.mul1.16.exl3",)
"""Members of families that convert differently from those that `polyquant codecs` lists."""


@cache
def _known() -> tuple[Codec, ...]:
    return tuple(registry.codec(name) for name in (*registry.known_codecs(), *_MORE))


def _exact(codec: Codec) -> Iterator[Codec]:
    """Codecs of two families that hold the codes of another one, with its bits and groups in their names."""
    if codec.form is TrellisCodes:
        yield exact_trellis(codec, SHAPE)
    elif (found := exact_msmodelslim(codec, SHAPE)) is not None:
        yield found


def _integer(codec: Codec) -> bool:
    return claims(codec, MaybeIntegers) and codec.is_integer  # type: ignore[type-abstract]


def _declared(name: str) -> DeclaresCodecs:
    form = registry.format_named(name)
    assert isinstance(form, DeclaresCodecs)
    return form


def _weights(codec: Codec) -> list[Weight]:
    """Weights of a codec with and without offsets."""
    out = []
    for fill in FILLS:
        parts = {}
        for name, spec in codec.specs(SHAPE).items():
            array = np.full(spec.nbytes, fill, np.uint8).view(spec.dtype).reshape(spec.shape)
            parts[name] = array if spec.dtype.kind in "iu" else np.ones(spec.shape, spec.dtype)
        out.append(Weight("w", SHAPE, codec, in_memory(parts)))
    return out


def outcome(codec: Codec, target: str) -> tuple[Action, tuple[str, ...]]:
    """What a conversion to the format does to a matrix of this codec without options, and the codecs it may become."""
    form, weights, tensor = _declared(target), _weights(codec), TensorMap("w", ("w",), SHAPE)
    if form.writes(codec):
        return Action.COPY, (codec.name,)
    found: dict[Action, list[str]] = {}
    for other in (*_exact(codec), *_known()):
        if form.writes(other) and not _integer(other):
            for weight in weights:
                try:
                    action = action_of([weight], other, tensor)
                except CodecError:
                    continue
                found.setdefault(action, []).append(other.name)
    for action in (Action.TRANSCODE, Action.DEQUANTIZE):
        if names := tuple(dict.fromkeys(found.get(action, ()))):
            return action, names if action is Action.TRANSCODE else ()
    return Action.REQUANTIZE, ()


def _family(name: str) -> str:
    """The name with N for numbers of bits."""
    return re.sub(r"\.\d+(?=\.|$)", ".N", name)


def _families(names: list[str]) -> str:
    """Codec names for a cell; members of a family that differ in numbers share an entry."""
    entries: dict[str, list[str]] = {}
    for name in names:
        entries.setdefault(_family(name), []).append(name)
    return ", ".join(f"`{members[0] if len(members) == 1 else pattern}`" for pattern, members in entries.items())


@cache
def _table(source: str, target: str) -> tuple[str, dict[Action, int]]:
    """The rows of a page, and the number of codecs in each class."""
    rows: dict[tuple[Action, tuple[str, ...]], list[str]] = {}
    counts: dict[Action, int] = {}
    for codec in _known():
        if _declared(source).reads(codec):
            action, names = outcome(codec, target)
            key = (action, () if action is Action.COPY else tuple(dict.fromkeys(map(_family, names))))
            rows.setdefault(key, []).append(codec.name)
            counts[action] = counts.get(action, 0) + 1
    order = list(CLASSES)
    lines = ["| codec of the source | class | becomes |", "|---|---|---|"]
    for (action, names), codecs in sorted(rows.items(), key=lambda row: order.index(row[0][0])):
        floats = action is Action.DEQUANTIZE or "f32" in names
        becomes = "the same" if action is Action.COPY else "floats" if floats else _families(list(names))
        lines.append(f"| {_families(codecs)} | {CLASSES[action]} | {becomes} |")
    return "\n".join(lines), counts


def samples(folder: Path, source: str) -> Iterator[tuple[str, Path]]:
    """Small models in a format: (codec of the matrices, path)."""
    for codec in _SAMPLES[source]:
        path = folder / f"{codec}-{_DST.get(source, source)}"
        pq.convert(MODEL, path, to=source, codec=codec)
        yield codec, path


def example(path: Path, target: str) -> tuple[dict[str, str], str]:
    """The plan without options: (codec of matrices -> its class and the target's codec, "") or ({}, error)."""
    try:
        plan = pq.plan(path, target)
    except PolyquantError as problem:
        return {}, str(problem).rpartition(f"{path.name}: ")[2]
    steps = [step for step in plan.steps if not step.map.is_vector]
    return {f"{s.source}": f"{CLASSES[s.action]}: `{s.target}`" for s in steps}, ""


def _examples(models: list[tuple[str, Path]], target: str) -> str:
    out = []
    for codec, path in models:
        found, problem = example(path, target)
        wanted = (f"`{a}` {b}" for a, b in found.items() if a == codec or len(found) == 1)
        out.append(f"| `{codec}` | {f'refused: {problem}' if problem else '; '.join(wanted)} |")
    return "\n".join(("| matrices | plan |", "|---|---|", *out))


@cache
def _quantizes(target: str) -> bool:
    """True if `polyquant quantize` has a default for the format that it accepts."""
    form = registry.format_named(target)
    assert form.target is not None
    try:
        pq.plan(MODEL, target, **form.target.smaller)
    except PolyquantError:
        return False
    return True


def _options(target: str) -> str:
    kind = registry.format_named(target)
    cls = getattr(kind, "target_options", None)
    flags = [f"| `{o.flag}` | {o.help} |" for o in options_of(cls).values() if o.flag] if cls else []
    return "\n".join(("| option | effect |", "|---|---|", *flags)).replace("<", r"\<") if flags else "None."


def _page(models: list[tuple[str, Path]], source: str, target: str) -> str:
    a, b = registry.format_named(source), registry.format_named(target)
    table, _ = _table(source, target)
    src, dst = _DST.get(source, f"{source}-folder"), f"out{'.gguf' if target == 'gguf' else ''}"
    lines = {f"polyquant convert {src} {dst} --to {target}": "what the table says"}
    if _quantizes(target):
        lines[f"polyquant quantize {src} {dst} --to {target}"] = "floats to codes"
        lines[f"polyquant quantize {src} {dst} --to {target} --requantize"] = "codes to other codes too"
    else:
        lines[f"polyquant convert {src} {dst} --to {target} --codec bf16"] = "everything to floats"
    width = max(map(len, lines))
    commands = "\n".join(f"{line:{width}}   # {text}" for line, text in lines.items())
    return f"""\
# {a.title} to {b.title}

```text
{commands}
```

Formats: [{a.title}](../formats/{_PAGES[source]}.md), [{b.title}](../formats/{_PAGES[target]}.md).
`--dry-run` prints the class of every tensor before any work. Names, row order, metadata and tokenizer are translated if
the formats differ.

## What happens to each codec

{table}

The classes are explained in the [overview](README.md#classes). "Equal codes" holds where scales, groups and offsets
fit: a 4-bit codec with offsets needs a target with minimums (`q4_1`). Vectors (norms, biases) stay floats.

## A small Llama without options

{_examples(models, target)}

## Options of the target

{_options(target)}
"""


def pages() -> dict[str, str]:
    """File name -> text."""
    out = {}
    names = list(registry.FORMATS)
    targets = [name for name in writable() if name in names]
    titles = {name: registry.format_named(name).title for name in names}
    rows = ["| from \\ to | " + " | ".join(titles[t] for t in targets) + " |", "|---|" + "---|" * len(targets)]
    for source in names:
        cells = []
        with TemporaryDirectory() as folder:
            models = list(samples(Path(folder), source))
            for target in targets:
                name = f"{source}-to-{target}.md"
                out[name] = _page(models, source, target)
                _, counts = _table(source, target)
                text = ", ".join(f"{counts[action]} {label}" for action, label in CLASSES.items() if action in counts)
                cells.append(f"[{text}]({name})")
        rows.append(f"| {titles[source]} | " + " | ".join(cells) + " |")
    toctree = "\n".join(f"* [{titles[s]} to {titles[t]}]({s}-to-{t}.md)" for s in names for t in targets)
    out["README.md"] = (
        "# Conversions between formats\n\nEach cell counts the codecs of the source by the effect on them without "
        "options, and links to a page.\n\n"
        + "\n".join(rows)
        + f"\n\n## Classes\n\n{_EXPLAINED}\n## Pages\n\n{toctree}\n"
    )
    return out


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/howto")
    out = parser.parse_args().out
    for name, text in pages().items():
        (out / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
