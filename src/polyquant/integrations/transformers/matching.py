"""Check, before loading, that the tensors of a checkpoint and of a model match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeAlias

from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.utils.loading_report import LoadStateDictInfo

from polyquant.errors import InputError

__all__ = ["Renaming", "Shapes", "Sources", "refuse_report", "require_match"]

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Sources: TypeAlias = Mapping[tuple[str, str], Sequence[str]]
"""(first tensor that a converter makes, pattern) -> the checkpoint's tensors for the pattern, in order."""


class Renaming:
    """The names that transformers gives to the tensors of a checkpoint."""

    def __init__(self, model: Any, conversions: Sequence[Any]) -> None:
        conversions = deepcopy(list(conversions))  # they are stateful
        self._renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        self._converters = [c for c in conversions if isinstance(c, WeightConverter)]
        self._by_pattern = {p: c for c in self._converters for p in c.source_patterns}
        self._prefix = model.base_model_prefix
        self.wanted = model.state_dict()

    def __call__(self, name: str) -> tuple[str, str | None]:
        """Return (name in the model, pattern of the converter that merges or splits it, or None)."""
        target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self.wanted)
        if target not in self.wanted and name in self.wanted:
            target, pattern = rename_source_key(name, [], [], self._prefix, self.wanted)
        return target, pattern

    def plain(self, name: str) -> str:
        """Return the name in the model without merging or splitting."""
        return str(rename_source_key(name, self._renamings, [], self._prefix, self.wanted)[0])

    def converter(self, name: str) -> Any | None:
        """Return the converter that merges or splits a tensor, or None."""
        _, pattern = self(name)
        return None if pattern is None else self._by_pattern[pattern]

    def results(self, target: str, pattern: str) -> set[str]:
        """Return all tensors of the model that a converter makes; `target` is the first one."""
        targets = self._by_pattern[pattern].target_patterns
        return {target.replace(targets[0], t) for t in targets}


def require_match(model: Any, conversions: Sequence[Any], stored: Shapes, file: object) -> Sources:
    """Return the tensors given to each converter.

    Raises InputError for the first tensor that is missing, unexpected or misshapen.
    """
    rename = Renaming(model, conversions)
    covered: set[str] = set()
    sources: dict[tuple[str, str], list[str]] = {}
    unexpected: set[str] = set()
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename(name)
        if target not in rename.wanted:
            unexpected.add(name)
        elif pattern is not None:
            covered |= rename.results(target, pattern)
            sources.setdefault((target, pattern), []).append(name)
        else:
            covered.add(target)
        if target in rename.wanted and pattern in (None, "weight"):
            expected = tuple(rename.wanted[target].shape)
            if expected != tuple(stored[name]):
                raise InputError(
                    "a tensor does not fit the model",
                    file=file,
                    tensor=name,
                    expected=list(expected),
                    found=list(stored[name]),
                    hint="nothing was loaded",
                )
    tied = {a for pair in model.all_tied_weights_keys.items() for a in pair if covered & set(pair)}
    refuse_report(model, set(rename.wanted) - covered - tied, unexpected, file)
    return sources


def refuse_report(model: Any, missing: set[str], unexpected: set[str], file: object) -> None:
    """Raise InputError unless the model declares these tensors as ignorable."""
    report = LoadStateDictInfo(
        missing_keys=missing,
        unexpected_keys=unexpected,
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
    model._adjust_missing_and_unexpected_keys(report)
    for names, what in (
        (report.missing_keys, "a tensor required by the model is missing from the checkpoint"),
        (report.unexpected_keys, f"the checkpoint has a tensor that {type(model).__name__} does not have"),
    ):
        if names:
            more = f" (and {len(names) - 1:,} more)" if len(names) > 1 else ""
            raise InputError(what + more, file=file, tensor=min(names), hint="nothing was loaded")
