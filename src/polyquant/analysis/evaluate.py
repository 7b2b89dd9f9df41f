"""Perplexity of a checkpoint on a text file, and its divergence from another checkpoint on the same tokens."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.analysis.divergence import Pair, Scores, compare_windows
from polyquant.codecs.tl import Tile
from polyquant.errors import InputError, PlanError, printable
from polyquant.formats.progress import shows_progress
from polyquant.formats.steps import Progress
from polyquant.runtime.kv_cache import CacheType
from polyquant.runtime.load import Activations, load
from polyquant.runtime.model import Model
from polyquant.runtime.scoring import target_log_probs
from polyquant.runtime.text import read_text, text_tokens
from polyquant.runtime.windows import Window, halves, sliding
from polyquant.tables import Row, Table, size

__all__ = [
    "Divergence",
    "Evaluation",
    "LayerError",
    "Mean",
    "Score",
    "context_of",
    "divergence_of",
    "evaluate",
    "score_of",
    "scored_bytes",
]

DEFAULT_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over the scored tokens with its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, x: NDArray[Any]) -> Mean:
        """Mean and s / sqrt(n), s the sample standard deviation; nan for a single value."""
        error = float(x.std(ddof=1)) / math.sqrt(len(x)) if len(x) > 1 else math.nan
        return cls(float(x.mean(dtype=np.float64)), error)


@dataclass(frozen=True, slots=True)
class Score:
    """The result of one checkpoint.

    nll: mean -log p of a scored token in nats; bytes: UTF-8 bytes of the scored tokens; cache: type of the KV cache;
    notes: from opening the checkpoint.
    """

    path: str
    format: str
    cache: str
    notes: tuple[str, ...]
    nbytes: int
    bpw: float
    tokens: int
    bytes: int
    nll: Mean

    @property
    def perplexity(self) -> Mean:
        """exp(nll), with the error to first order."""
        value = _exp(self.nll.value)
        return Mean(value, value * self.nll.error)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text: comparable between tokenizers if they score the same text."""
        return self.nll.value * self.tokens / math.log(2) / self.bytes

    def columns(self) -> Row:
        """The figures as columns of a row."""
        return {
            "path": self.path, "format": self.format, "cache": self.cache, "bytes": self.nbytes, "bpw": self.bpw,
            "tokens": self.tokens, "nll": self.nll.value, "nll_error": self.nll.error,
            "perplexity": self.perplexity.value, "perplexity_error": self.perplexity.error,
            "bits_per_byte": self.bits_per_byte,
        }  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The values as JSON-compatible types."""
        return {**asdict(self), "perplexity": asdict(self.perplexity), "bits_per_byte": self.bits_per_byte}


@dataclass(frozen=True, slots=True)
class LayerError:
    """Relative RMS error of the output of "embedding", "layer 0", ... or "head".

    output: with both models as they run; alone: on the reference's input.
    """

    name: str
    output: float
    alone: float


@dataclass(frozen=True, slots=True, repr=False)
class Divergence:
    """Divergence of the model from the reference over the scored tokens; analysis/divergence.py has the formulas.

    log_ratio: mean of log(perplexity / reference's perplexity), paired, so that its error is much smaller than that of
    the two perplexities. probability_rms: root mean square change of the correct token's probability.
    """

    log_ratio: Mean
    kl: Mean
    kl_99: float
    kl_max: float
    top_1: Mean
    probability_rms: float
    layers: tuple[LayerError, ...]

    def __repr__(self) -> str:
        figures = f"KL divergence {self.kl.value:.3g} ± {self.kl.error:.2g}, same first token {self.top_1.value:.2%}"
        return f"<Divergence {figures}, {len(self.layers)} parts>"

    def _repr_html_(self) -> str:
        rows = ((part.name, f"{part.output:.4g}", f"{part.alone:.4g}") for part in self.layers)
        columns = ("part", "error of the output", "own error")
        return Table(repr(self).strip("<>"), columns, rows, len(self.layers)).html()

    def rows(self) -> list[Row]:
        """One row per part of the model, in order of computation: part, output, alone (relative RMS errors)."""
        return [{"part": part.name, "output": part.output, "alone": part.alone} for part in self.layers]

    def columns(self) -> Row:
        """The figures as columns of a row."""
        return {
            "kl": self.kl.value, "kl_error": self.kl.error, "kl_99": self.kl_99, "kl_max": self.kl_max,
            "top_1": self.top_1.value, "probability_rms": self.probability_rms, "log_ratio": self.log_ratio.value,
            "log_ratio_error": self.log_ratio.error,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation:
    """The result of `polyquant eval`. method: "halves" or "sliding" (runtime/windows.py); stride: None for halves."""

    text: str
    method: str
    context: int
    stride: int | None
    windows: int
    activations: str
    model: Score
    reference: Score | None
    divergence: Divergence | None

    def __repr__(self) -> str:
        perplexity = self.model.perplexity
        figures = f"perplexity {perplexity.value:.4g} ± {perplexity.error:.2g} on {self.model.tokens:,} tokens"
        if self.divergence is not None:
            figures += f", KL divergence {self.divergence.kl.value:.3g}"
        return f"<Evaluation {printable(self.model.path)}: {figures}>"

    def _repr_html_(self) -> str:
        rows = (
            (
                s.path, size(s.nbytes), f"{s.bpw:.3f}", f"{s.perplexity.value:.4g} ± {s.perplexity.error:.2g}",
                f"{s.bits_per_byte:.4f}", "" if d is None else f"{d.kl.value:.3g} ± {d.kl.error:.2g}",
                "" if d is None else f"{d.top_1.value:.2%}",
            )
            for s, d in self._scores
        )  # fmt: skip
        columns = (
            "model",
            "size",
            "bits per weight",
            "perplexity",
            "bits per byte",
            "KL divergence",
            "same first token",
        )
        title = f"Evaluation on {printable(self.text)}: {self.model.tokens:,} tokens, context {self.context}"
        return Table(title, columns, rows, len(self._scores)).html()

    @property
    def _scores(self) -> list[tuple[Score, Divergence | None]]:
        """The model with its divergence, and the reference if there is one."""
        return [(self.model, self.divergence), *([] if self.reference is None else [(self.reference, None)])]

    def rows(self) -> list[Row]:
        """One row for the model and one for the reference, if any: the columns of `Score`, and the divergence (None for
        the reference).
        """
        unknown = {n: None for d in (self.divergence,) if d is not None for n in d.columns()}
        return [{**s.columns(), **(unknown if d is None else d.columns())} for s, d in self._scores]

    def to_json(self) -> dict[str, Any]:
        """The values as JSON-compatible types."""
        out = asdict(self)
        out["model"] = self.model.to_json()
        out["reference"] = self.reference.to_json() if self.reference is not None else None
        return out


@shows_progress("evaluate")
def evaluate(
    path: str | os.PathLike[str],
    *,
    text: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    context: int | None = None,
    stride: int | None = None,
    tokens: int | None = None,
    activations: Activations = "int8",
    cache: CacheType | None = None,
    ternary_layout: str | None = None,
    against_layout: str | None = None,
    tile: Tile | None = None,
    progress: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Evaluation:
    """Evaluate the checkpoint at `path` on the UTF-8 file `text`, and with `against` its divergence from that
    checkpoint.

        context: tokens per window, including BOS (default: the model's context, at most 512). stride: None scores the
        second
        half of windows without overlap; a number slides the window and scores every token (runtime/windows.py). tokens:
        use
        only the first N tokens of the text. activations, cache: as for `load`, for both. ternary_layout,
        against_layout: I2_S
        layouts of the two; tile: tile of TL1 and TL2 in either.
        Raises InputError, PlanError if the vocabularies differ, UnsupportedError.
    """
    if tokens is not None and tokens < 1:
        raise InputError("tokens must be positive", expected="at least 1", found=tokens)
    words = read_text(text)
    model = load(path, activations=activations, cache=cache, ternary_layout=ternary_layout, tile=tile)
    other = None
    if against is not None:
        other = load(against, activations=activations, cache=cache, ternary_layout=against_layout, tile=tile)
        _same_vocabulary(model, other)
    context = context_of(context, model if other is None else min(model, other, key=lambda m: m.context))
    ids, bos = text_tokens(model, words, tokens)
    windows = list(halves(ids, context, bos) if stride is None else sliding(ids, context, stride, bos))
    watch = _Watch(on_progress, sum(w.stop - w.start for w in windows))
    text_bytes = scored_bytes(model, ids, windows)
    theirs, divergence = None, None
    if other is None:
        mine = score_of(model, _alone(model, windows, watch), text_bytes)
    else:
        scores = compare_windows(Pair(model, other), windows, watch)
        mine, theirs = score_of(model, scores.model, text_bytes), score_of(other, scores.reference, text_bytes)
        divergence = divergence_of(scores)
    return Evaluation(
        text=str(text),
        method="halves" if stride is None else "sliding",
        context=context,
        stride=stride,
        windows=len(windows),
        activations=activations,
        model=mine,
        reference=theirs,
        divergence=divergence,
    )


def context_of(requested: int | None, narrowest: Model) -> int:
    """Tokens per window. Raises InputError for more than both models support, or too few to score."""
    context = min(DEFAULT_CONTEXT, narrowest.context) if requested is None else requested
    if not 4 <= context <= narrowest.context:
        raise InputError(
            "the context does not fit the model",
            file=narrowest.checkpoint.path,
            expected=f"4 to {narrowest.context} tokens",
            found=context,
        )
    return context


def scored_bytes(model: Model, ids: NDArray[np.int64], windows: Sequence[Window]) -> int:
    """UTF-8 bytes of the scored tokens of all windows."""
    return sum(_bytes(model, ids, w) for w in windows)


def _bytes(model: Model, ids: NDArray[np.int64], window: Window) -> int:
    """UTF-8 bytes of the scored tokens of a window, up to characters split at its edges."""
    before = ids[max(0, window.start - 4) : window.start].tolist()  # decoders treat the start of a string differently
    tokens = before + ids[window.start : window.stop].tolist()

    def length(part: list[int]) -> int:
        return len(model.tokenizer.decode(part, skip_special=False).encode()) if part else 0

    return length(tokens) - length(before)


def _same_vocabulary(model: Model, other: Model) -> None:
    """Raise PlanError unless both models have the same tokens."""
    hint = "compare models with different tokenizers by bits per byte: evaluate each without --against"
    if model.vocab != other.vocab:
        raise PlanError(
            "vocabulary sizes differ",
            file=other.checkpoint.path,
            expected=model.vocab,
            found=other.vocab,
            hint=hint,
        )
    mine, theirs = model.tokenizer.tokens(), other.tokenizer.tokens()
    for i in sorted(mine.keys() & theirs.keys()):
        if mine[i] != theirs[i]:
            raise PlanError(
                f"vocabularies differ at token {i}",
                file=other.checkpoint.path,
                expected=mine[i],
                found=theirs[i],
                hint=hint,
            )


class _Watch:
    """Count scored tokens and report the perplexity so far."""

    def __init__(self, tell: Callable[[Progress], None] | None, total: int) -> None:
        self.tell, self.total, self.done, self.nats = tell, total, 0, 0.0

    def __call__(self, window: Window, logs: NDArray[np.float64]) -> None:
        self.done += len(logs)
        self.nats -= float(logs.sum())
        if self.tell is not None:
            self.tell(Progress(self.done, self.total, f"perplexity {_exp(self.nats / self.done):.4g}", 0.0))


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _alone(model: Model, windows: list[Window], watch: _Watch) -> NDArray[np.float64]:
    out = []
    for window in windows:
        out.append(target_log_probs(model.decoder, model.session().cache, window))
        watch(window, out[-1])
    return np.concatenate(out)


def score_of(model: Model, logs: NDArray[np.float64], text_bytes: int) -> Score:
    """The score of a model. logs: log p of each scored token in nats; text_bytes: their UTF-8 bytes."""
    checkpoint = model.checkpoint
    return Score(
        path=str(checkpoint.path),
        format=checkpoint.format,
        cache=model.decoder.cache_type,
        notes=checkpoint.notes,
        nbytes=checkpoint.nbytes,
        bpw=checkpoint.bpw,
        tokens=len(logs),
        bytes=text_bytes,
        nll=Mean.of(-logs),
    )


def divergence_of(scores: Scores) -> Divergence:
    """The means and extremes of the scores."""
    return Divergence(
        log_ratio=Mean.of(scores.reference - scores.model),
        kl=Mean.of(scores.divergence),
        kl_99=float(np.quantile(scores.divergence, 0.99)),
        kl_max=float(scores.divergence.max()),
        top_1=Mean.of(scores.agree.astype(np.float64)),
        probability_rms=float(np.sqrt(np.square(np.exp(scores.model) - np.exp(scores.reference)).mean())),
        layers=tuple(
            LayerError(_layer(i, len(scores.layers)), output.rrmse, alone.rrmse)
            for i, (output, alone) in enumerate(scores.layers)
        ),
    )


def _layer(i: int, n: int) -> str:
    return "embedding" if i == 0 else "head" if i == n - 1 else f"layer {i - 1}"
