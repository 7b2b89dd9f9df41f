"""The opened models and the readers of their contents. Everything here may wait for a file or a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyquant.errors import PolyquantError, UnknownTensorError
from polyquant.integrations.tui.headers import Headers
from polyquant.integrations.tui.listing import Entry
from polyquant.opening import accepted, detect, look
from polyquant.types import Checkpoint

if TYPE_CHECKING:  # imported on first use: the first screen works without them
    from polyquant.analysis.compare import TensorComparison
    from polyquant.analysis.side import Side
    from polyquant.analysis.statistics import Statistics
    from polyquant.tokenizers.tokenizer import Tokenizer
    from polyquant.types import Findings

__all__ = ["Models"]


class Models:
    """One model, or a reference and the one next to it."""

    def __init__(self, paths: Sequence[str], ternary_layout: str | None = None) -> None:
        self.paths = tuple(paths)
        self._layout = ternary_layout
        self._lock = threading.Lock()
        self._opened: tuple[Checkpoint, ...] | None = None
        self._sides: tuple[dict[str, Side], ...] = ()
        self.problem = ""

    @property
    def opened(self) -> tuple[Checkpoint, ...]:
        """The checkpoints, opened on first use. Raises InputError, RemoteError."""
        with self._lock:
            if self._opened is None:
                self._opened = tuple(look(path, **self._options(path)) for path in self.paths)
            return self._opened

    @property
    def sides(self) -> tuple[dict[str, Side], ...]:
        """The tensors of each model, with the same names."""
        opened = self.opened
        with self._lock:
            if not self._sides:
                self._sides = self._matched(opened)
            return self._sides

    def _options(self, path: str) -> dict[str, Any]:
        return {} if self._layout is None else accepted(detect(path)[0], {"ternary_layout": self._layout})

    def _matched(self, opened: Sequence[Checkpoint]) -> tuple[dict[str, Side], ...]:
        if len(opened) == 2:
            from polyquant.analysis.compare import sides

            try:
                return sides(*opened)
            except PolyquantError as problem:
                self.problem = f"tensors are matched by their stored names: {problem}"
        from polyquant.analysis.side import Side

        return tuple({w.name: Side((w,), w.shape) for w in c.values()} for c in opened)

    def headers(self) -> Headers:
        """Open the models and list their tensors."""
        from polyquant.analysis.inspect import architecture_of

        a, *others = self.opened
        if not others:  # without the import of what a comparison needs
            stored = tuple(Entry(w.name, w.shape, str(w.codec), w.nbytes) for w in a.values())
            return Headers(a.format, architecture_of(a), stored, a.notes)
        left, right = self.sides
        entries = [_entry(name, side, right.get(name)) for name, side in left.items()]
        entries += [
            Entry(n, s.shape, "", 0, s.shape, s.codec, _bytes(s), alone=True) for n, s in right.items() if n not in left
        ]
        notes = tuple(note for c in self.opened for note in c.notes)
        return Headers(a.format, architecture_of(a), tuple(entries), notes, others[0].format, self.problem)

    def sides_of(self, name: str) -> list[Side]:
        """The tensor in each model that has it. Raises UnknownTensorError."""
        found = [side[name] for side in self.sides if name in side]
        if not found:
            raise UnknownTensorError(self.opened[0].path, name, self.sides[0])
        return found

    def parts(self, name: str) -> list[str]:
        """The stored parts of a tensor of the first model that has it: name, dtype and shape."""
        return [
            f"{part} {array.spec.dtype} {list(array.spec.shape)}"
            for weight in self.sides_of(name)[0].weights[:1]
            for part, array in weight.arrays.items()
        ]

    def statistics(self, name: str, every: bool, tick: Callable[[int, int, str], None]) -> list[Statistics]:
        """The statistics of a tensor in each model that has it."""
        from polyquant.analysis.statistics import statistics

        found = self.sides_of(name)
        out: list[Statistics] = []
        for i, side in enumerate(found):

            def watch(done: int, total: int, i: int = i) -> None:
                tick(i * total + done, len(found) * total, name)

            tick(i, len(found), name)
            edge = out[0].edge if out else None
            out.append(statistics(side, every=every, edge=edge, on_rows=watch))
        return out

    def compare(self, name: str, tick: Callable[[int, int, str], None]) -> TensorComparison:
        """The error of the second model's tensor against the first's."""
        from polyquant.analysis.compare import compare_tensor

        a, b = self.sides_of(name)
        return compare_tensor(name, a, b, on_rows=lambda done, total: tick(done, total, name))

    def findings(self, which: int, every: bool, tick: Callable[[int, int, str], None]) -> Findings:
        """The findings of `validate`: of headers and small files, or with `every` of all data."""
        from polyquant.analysis.validate import validate
        from polyquant.storage.parsed import parsed_once

        path = self.paths[which]
        if not every:
            with parsed_once():
                return validate(path, headers=True, **self._options(path))
        return validate(path, on_progress=lambda p: tick(p.done, p.total, p.tensor), **self._options(path))

    def metadata(self, which: int) -> dict[str, Any]:
        """Metadata, then the entries of config.json, nested ones with dots."""
        checkpoint = self.opened[which]
        out = dict(checkpoint.metadata)
        if checkpoint.config:
            out |= {f"config.json: {key}": value for key, value in _flat(checkpoint.config)}
        return out

    def tokenizer(self, which: int) -> Tokenizer:
        """The tokenizer. Raises UnsupportedError if there is none or a package is missing, InputError."""
        from polyquant.tokenizers.tokenizer import open_tokenizer

        return open_tokenizer(self.opened[which])

    def templates(self, which: int) -> dict[str, str]:
        """The chat templates by name, as stored. Raises InputError."""
        checkpoint = self.opened[which]
        if checkpoint.naming == "gguf":
            prefix = "tokenizer.chat_template"
            found = {
                k.removeprefix(prefix).lstrip("."): v for k, v in checkpoint.metadata.items() if k.startswith(prefix)
            }
            return {name or "default": text for name, text in found.items() if isinstance(text, str)}
        from polyquant.tokenizers.reading import chat_templates, settings_of

        return chat_templates(checkpoint.files, settings_of(checkpoint.files))


def _flat(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries of nested objects under joined keys."""
    stack = [("", iter(config.items()))]
    while stack:  # not recursive: files nest as deep as the JSON reader allows
        prefix, items = stack[-1]
        key, value = next(items, (None, None))
        if key is None:
            stack.pop()
        elif isinstance(value, Mapping) and value:
            stack.append((f"{prefix}{key}.", iter(value.items())))
        else:
            yield f"{prefix}{key}", value


def _bytes(side: Side) -> int:
    return sum(w.nbytes for w in side.weights)


def _entry(name: str, side: Side, other: Side | None) -> Entry:
    if other is None:
        return Entry(name, side.shape, side.codec, _bytes(side))
    return Entry(name, side.shape, side.codec, _bytes(side), other.shape, other.codec, _bytes(other))
