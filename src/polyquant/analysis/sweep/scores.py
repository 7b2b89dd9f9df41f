"""Logits of the source, stored once for all candidates, and the evaluation of a candidate against them.

Each window of the text is one file of float32 [scored tokens, vocab], as many as fit on the disk; the source computes
the others again. The figures are those of `evaluate(..., against=source)` without the layers.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.analysis.divergence import Scores, compare_with_logits
from polyquant.analysis.evaluate import Evaluation, context_of, divergence_of, score_of, scored_bytes
from polyquant.errors import InputError, PlanError
from polyquant.runtime.load import load
from polyquant.runtime.model import Model
from polyquant.runtime.scoring import log_probs, scored_logits
from polyquant.runtime.text import read_text, text_tokens
from polyquant.runtime.windows import Window, halves
from polyquant.types import F32

__all__ = ["Request", "Stored", "evaluate_against", "evaluate_source"]

Tell = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Request:
    """The text and how much of it is used; defaults as for `evaluate`."""

    text: str
    tokens: int | None
    context: int | None


@dataclass(frozen=True, slots=True)
class Stored:
    """Files of logits for the first windows: name, bytes, CRC-32. ids: a digest of the tokens; vocab: their width."""

    files: tuple[tuple[str, int, int], ...]
    ids: str
    vocab: int
    windows: int

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(nbytes for _, nbytes, _ in self.files)

    def to_json(self) -> dict[str, Any]:
        """The values as JSON-compatible types."""
        return asdict(self)

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Stored:
        """The inverse of `to_json`."""
        files = tuple((str(name), int(n), int(crc)) for name, n, crc in entry["files"])
        return cls(files, entry["ids"], entry["vocab"], entry["windows"])


@dataclass(frozen=True, slots=True)
class _Passage:
    windows: Sequence[Window]
    context: int
    nbytes: int
    digest: str


def _passage(model: Model, request: Request) -> _Passage:
    """The windows of the text for a model. Raises InputError."""
    context = context_of(request.context, model)
    ids, bos = text_tokens(model, read_text(request.text), request.tokens)
    windows = list(halves(ids, context, bos))
    digest = hashlib.sha256(f"{context} {bos} ".encode() + ids.tobytes()).hexdigest()
    return _Passage(windows, context, scored_bytes(model, ids, windows), digest)


def evaluate_source(
    path: str | os.PathLike[str], request: Request, folder: Path, room: int, threads: int | None, tell: Tell
) -> tuple[Evaluation, Stored]:
    """Evaluate the source; store the logits of as many windows as fit into `room` bytes. Raises InputError."""
    model = load(path, threads=threads)
    passage = _passage(model, request)
    folder.mkdir(exist_ok=True)
    files: list[tuple[str, int, int]] = []
    scores = []
    for i, window in enumerate(passage.windows):
        size = 4 * model.vocab * (window.stop - window.start)
        keep = len(files) == i and sum(n for _, n, _ in files) + size <= room
        if keep:
            logs, entry = _store(model, window, folder / f"window-{i:05d}.f32")
            files.append(entry)
        else:
            logs = [log_probs(*scored) for scored in _logits(model, window)]
        scores += logs
        tell(i + 1, len(passage.windows))
    evaluation = _evaluation(request, passage, model, np.concatenate(scores))
    return evaluation, Stored(tuple(files), passage.digest, model.vocab, len(passage.windows))


def _logits(model: Model, window: Window) -> Iterator[tuple[F32, NDArray[np.int64]]]:
    """Logits [n, vocab] of the scored tokens of a window, a piece at a time, and the tokens."""
    return scored_logits(model.decoder, model.session().cache, window)


def _store(model: Model, window: Window, path: Path) -> tuple[list[NDArray[np.float64]], tuple[str, int, int]]:
    """Write the logits of a window. Returns log p of its tokens and its entry."""
    logs, nbytes, crc = [], 0, 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o666), "wb") as file:  # noqa: PTH123 - through the descriptor
        for logits, targets in _logits(model, window):
            data = np.ascontiguousarray(logits, np.float32).tobytes()
            file.write(data)
            nbytes, crc = nbytes + len(data), zlib.crc32(data, crc)
            logs.append(log_probs(logits, targets))
    return logs, (path.name, nbytes, crc)


def evaluate_against(
    path: str | os.PathLike[str],
    source: str | os.PathLike[str],
    request: Request,
    stored: Stored,
    folder: Path,
    threads: int | None,
    tell: Tell,
) -> Evaluation:
    """Evaluate a candidate against the source. Raises InputError, PlanError if its tokens differ."""
    model = load(path, threads=threads)
    passage = _passage(model, request)
    if passage.digest != stored.ids or model.vocab != stored.vocab:
        raise PlanError("the candidate's tokenizer gives other tokens than the source's", file=path)
    reference: Model | None = None

    def logits_of(i: int) -> F32:
        nonlocal reference
        rows = _read(folder, stored.files[i], stored.vocab) if i < len(stored.files) else None
        if rows is None:
            reference = load(source, threads=threads) if reference is None else reference
            rows = np.concatenate([logits for logits, _ in _logits(reference, passage.windows[i])])
        return rows

    windows = passage.windows
    scores = compare_with_logits(model, windows, logits_of, lambda i: tell(i + 1, len(windows)))
    return _evaluation(request, passage, model, scores.model, scores)


def _read(folder: Path, entry: tuple[str, int, int], vocab: int) -> F32 | None:
    """The stored logits of a window; None if the file is missing or damaged."""
    name, nbytes, crc = entry
    try:
        data = (folder / name).read_bytes()
    except OSError:
        return None
    if len(data) != nbytes or zlib.crc32(data) != crc:
        return None
    return np.frombuffer(bytearray(data), np.float32).reshape(-1, vocab)


def _evaluation(
    request: Request, passage: _Passage, model: Model, logs: NDArray[np.float64], scores: Scores | None = None
) -> Evaluation:
    if not len(logs):
        raise InputError("no token of the text is scored", file=request.text)
    return Evaluation(
        text=request.text,
        method="halves",
        context=passage.context,
        stride=None,
        windows=len(passage.windows),
        activations="int8",
        model=score_of(model, logs, passage.nbytes),
        reference=None,
        divergence=divergence_of(scores) if scores is not None else None,
    )
