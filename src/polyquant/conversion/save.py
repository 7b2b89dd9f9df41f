"""Save a user's arrays: planned and executed like a conversion, with arrays in memory as the source."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from polyquant.codecs.arguments import real
from polyquant.codecs.dtypes import PLAIN
from polyquant.conversion.convert import check_disk, implied_format, known_options, refuse_foreign, writable
from polyquant.conversion.execute import execute
from polyquant.conversion.plan import make_plan
from polyquant.conversion.report import Report
from polyquant.conversion.steps import with_name
from polyquant.errors import CodecError, PlanError, UnsupportedError
from polyquant.formats.existing import refuse_target
from polyquant.formats.progress import shows_progress
from polyquant.formats.protocol import TakesArrays
from polyquant.formats.steps import Progress
from polyquant.keywords import PLAN_DEFAULTS, FormatKeywords
from polyquant.options import build, given, options_of, refuse_unknown, with_keywords
from polyquant.recipes.reading import parse_rule
from polyquant.recipes.recipe import Rule
from polyquant.registry import DEFAULT_TARGET, format_named
from polyquant.registry import codec as codec_named
from polyquant.rows import in_memory
from polyquant.storage.locations import located
from polyquant.types import F32, Checkpoint, Codec, Floats, TensorMap, Weight

__all__ = ["save"]


@with_keywords(FormatKeywords, PLAN_DEFAULTS)
@shows_progress("save")
def save(
    tensors: Mapping[str, ArrayLike | Weight],
    path: str | os.PathLike[str],
    *,
    to: str | None = None,
    codec: str | Mapping[str, str] | None = None,
    recipe: str | None = None,
    rules: Sequence[Rule | str] = (),
    metadata: Mapping[str, Any] | None = None,
    importance: Mapping[str, F32] | None = None,
    requantize: bool = False,
    overwrite: bool = False,
    threads: int | None = None,
    measure: bool = True,
    max_memory: int | str | None = None,
    progress: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    **options: Unpack[FormatKeywords],
) -> Report:
    """Write arrays to `path`, which appears only when it is complete.

    tensors: name -> numpy array (float, integer or ml_dtypes), anything that numpy converts to one, or a Weight of an
    opened checkpoint, whose codes are kept. to: the format ("gguf", "hf", "trellis-v3", "msmodelslim"); default: by
    the suffix of the path (.gguf, .safetensors), else a Hugging Face folder. codec: one codec for all matrices,
    or a mapping from glob to codec, the first match wins; without one every array keeps its dtype. Vectors keep their
    dtype unless their exact name has a codec. recipe, rules, importance, requantize, options: as for `plan`. metadata:
    key/values of a GGUF file (their types are inferred; a Meta has its own), the entries of a folder's config.json, or
    the `__metadata__` of one .safetensors file.

    Tensors are not renamed, and rows are not permuted: use `convert` to turn a model into another naming scheme.
    Raises PlanError for unsupported tensors or options, UnknownNameError, CodecError, OSError.
    """
    target_path = located(path)
    refuse_target(target_path, None, overwrite=overwrite)
    requested = given({**options, "codec": codec})
    form = format_named(to or implied_format(target_path, requested) or DEFAULT_TARGET)
    target = writable(form)
    if not isinstance(form, TakesArrays):
        raise UnsupportedError(f"{form.title} are written from models only", found=form.name, hint="use `convert`")
    refuse_unknown(options, known_options(), "save")
    refuse_foreign(options, form, target)
    refuse_unknown(given(options), options_of(target.options), "save")
    if options.get("calibration") is not None:
        raise PlanError("a calibration needs a model, not arrays", hint="save a model folder, then convert it")
    weights = {name: _weight(name, value) for name, value in tensors.items()}
    if not weights:
        raise PlanError("there are no tensors to save", file=target_path)
    maps = tuple(TensorMap(w.name, (w.name,), w.shape, keep_float=len(w.shape) < 2) for w in weights.values())
    translation, more = form.of_arrays(maps, metadata or {}, target_path)
    source = Checkpoint(form.name, Path("<arrays>"), weights, naming=target.naming, in_memory=True)
    planned = make_plan(
        source,
        lambda _: translation,
        form.name,
        target,
        build(target.options, {**options, **more}),
        codec=codec if isinstance(codec, str) else None,
        recipe=recipe,
        rules=_rules(weights, codec, rules),
        requantize=requantize,
        importance=importance,
    )
    if (codec or recipe) and not any(s.target.form is not Floats for s in planned.steps) and not _floats(codec):
        raise PlanError(
            "no tensor would be quantized",
            file=target_path,
            hint="a mapping from glob to codec names them; Trellis and msModelSlim quantize linear layers, NAME.weight",
        )
    planned = with_name(planned, target_path)
    check_disk(planned, target_path)
    return execute(
        planned,
        target_path,
        resume="never",
        overwrite=overwrite,
        threads=threads,
        measure=measure,
        max_memory=max_memory,
        on_progress=on_progress,
    )


def _weight(name: str, value: ArrayLike | Weight) -> Weight:
    """Wrap an array or a weight. Raises PlanError if it is not an array of numbers."""
    if not isinstance(name, str) or not name:
        raise PlanError("a tensor needs a name", found=repr(name))
    if isinstance(value, Weight):
        return replace(value, name=name)
    try:
        array = np.require(real(name, value), requirements="C")
    except CodecError as problem:
        raise PlanError("is not an array of numbers", tensor=name, found=problem.found) from None
    except (TypeError, ValueError) as problem:
        raise PlanError(f"numpy cannot make an array of it: {problem}", tensor=name) from None
    stored = _codec_of(name, array.dtype)
    ((part, spec),) = stored.specs(array.shape).items()
    blocks = array.reshape(-1).view(np.uint8).reshape(spec.shape)
    return Weight(name, array.shape, stored, in_memory({part: blocks}))


def _codec_of(name: str, dtype: np.dtype[Any]) -> Codec:
    for known in PLAIN.values():
        candidate = codec_named(known)
        if getattr(candidate, "dtype", None) == dtype:
            return candidate
    raise PlanError("has a dtype that no format stores", tensor=name, found=dtype, hint="convert it to float32")


def _rules(
    weights: Mapping[str, Weight], codec: str | Mapping[str, str] | None, rules: Sequence[Rule | str]
) -> list[Rule]:
    """The given rules, those of a codec mapping, and one for each vector's dtype."""
    out = [parse_rule(r) if isinstance(r, str) else r for r in rules]
    if isinstance(codec, Mapping):
        out += [Rule(glob, codec_named(name).name) for glob, name in codec.items()]
    named = {rule.match for rule in out}
    vectors = (w for w in weights.values() if len(w.shape) < 2 and w.name not in named)
    return [*out, *(Rule(w.name, w.codec.name) for w in vectors if w.codec.form is Floats)]


def _floats(codec: str | Mapping[str, str] | None) -> bool:
    """True if only dtypes were requested."""
    names = [codec] if isinstance(codec, str) else list(codec.values()) if codec else []
    return bool(names) and all(codec_named(name).form is Floats for name in names)
