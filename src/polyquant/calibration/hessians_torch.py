"""Calibration through transformers, for architectures that the built-in decoder does not support.

The model is loaded completely, in the dtype of its files, and runs once on each window to record the arguments of its
layers (the longest list of modules of one class). Then the layers run one after the other over the states of all
windows, and only the statistics of one layer are held. Experts stacked in one tensor are not linear layers, and weights
outside the layers have no stage: these are not calibrated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polyquant.calibration.hessians import LEAST_INPUTS, G, Gatherer, Moments, Tick
from polyquant.calibration.statistics import CacheRanges
from polyquant.errors import InputError, UnsupportedError

__all__ = ["TorchStages"]

_HINT = "choose a method without calibration: --method trellis_viterbi, or a codec such as w8a16"


class TorchStages:
    """A transformers model with a stage per layer.

    Raises UnsupportedError if its layers are not a list of one class, InputError for too little text.
    """

    def __init__(
        self, path: str | os.PathLike[str], text: str | Sequence[str | Sequence[int]], *, windows: int, tokens: int
    ) -> None:
        """text: split into at most `windows` windows of `tokens` tokens; or samples (strings or token ids), one window
        each.
        """
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch: Any = torch
        folder = os.fspath(path)
        try:
            ids_only = not isinstance(text, str) and not any(isinstance(x, str) for x in text)
            tokenizer = None if ids_only else AutoTokenizer.from_pretrained(folder)
            self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        except (OSError, ValueError, KeyError) as problem:
            raise UnsupportedError(
                f"transformers cannot load it either: {str(problem).splitlines()[0]}",
                file=path,
                hint=_HINT,
            ) from problem
        lists = [(n, m) for n, m in self.model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 0]
        same = [(n, m) for n, m in lists if len({type(x) for x in m}) == 1 and ".layers." not in n]
        if not same:
            raise UnsupportedError("its layers are not a list of one class", file=path, hint=_HINT)
        self._prefix, self._layers = max(same, key=lambda pair: len(pair[1]))
        ids = _windows(tokenizer, text, windows, tokens)
        top, vocab = max(int(w.max()) for w in ids), self.model.get_input_embeddings().weight.shape[0]
        if top >= vocab:
            raise InputError("a token is outside the vocabulary", expected=f"0 to {vocab - 1}", found=top)
        self._windows = [torch.tensor(w)[None] for w in ids]
        self._calls: list[_Calls] = []

    def expect(self, requests: frozenset[str]) -> None:
        """See Stages: here all are computed in order, and kept by the caller."""

    @property
    def names(self) -> Sequence[Sequence[str]]:
        """See Stages."""
        linear = self._torch.nn.Linear
        return [
            [f"{self._prefix}.{i}.{n}.weight" for n, m in layer.named_modules() if isinstance(m, linear)]
            for i, layer in enumerate(self._layers)
        ]

    def run(self, index: int, wanted: frozenset[str], tick: Tick) -> Mapping[str, Moments]:
        """See Stages."""
        return self.gather(index, wanted, tick, Moments)

    def gather(
        self, index: int, wanted: frozenset[str], tick: Tick, make: Callable[[int], G], cache: CacheRanges | None = None
    ) -> Mapping[str, G]:
        """See GatheringStages. Raises UnsupportedError for a cache where attention has no k_proj and v_proj."""
        with self._torch.no_grad():
            if index == 0:
                self._calls = [self._calls_of(window) for window in self._windows]
            layer, gathered, hooks = self._layers[index], {}, []
            for name, module in layer.named_modules():
                full = f"{self._prefix}.{index}.{name}.weight"
                if full in wanted:
                    gathered[full] = make(module.weight.shape[1])
                    hooks.append(module.register_forward_pre_hook(_adding(gathered[full])))
            kept = _Kept(cache) if cache is not None else None
            if kept is not None and kept.before:
                hooks += kept.hooked(layer)
            try:
                for i, calls in enumerate(self._calls):
                    named = calls.named[index] if kept is None else kept.named(calls.named[index])
                    out = layer(calls.states, *calls.arguments[index], **named)
                    if kept is not None:
                        kept.finish_window()
                    calls.states = out[0] if isinstance(out, tuple) else out
                    tick((i + 1) / len(self._calls))
            finally:
                for hook in hooks:
                    hook.remove()
        return gathered

    def _calls_of(self, window: Any) -> _Calls:
        """Record the arguments of each layer for a window in one run of the model: masks may differ between layers."""
        calls = _Calls()

        def note(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            named = dict(named)
            states, rest = (arguments[0], arguments[1:]) if arguments else (named.pop("hidden_states"), ())
            if not calls.named:
                calls.states = states
            calls.arguments.append(rest)
            calls.named.append(named)

        hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in self._layers]
        try:
            self.model(window, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        if len(calls.named) != len(self._layers):
            raise UnsupportedError("its layers do not run one after the other", hint=_HINT)
        return calls


class _Calls:
    """One window: the states for the next layer, and the other arguments of each layer."""

    def __init__(self) -> None:
        self.states: Any = None
        self.arguments: list[tuple[Any, ...]] = []
        self.named: list[dict[str, Any]] = []


class _Kept:
    """Pass keys and values of one layer's attention to CacheRanges, from its linear layers or from cache updates."""

    def __init__(self, ranges: CacheRanges) -> None:
        self.ranges, self.before = ranges, ranges.before
        self._states: dict[str, Any] = {}

    def hooked(self, layer: Any) -> list[Any]:
        """Hooks on the layer's k_proj and v_proj."""
        modules = {n.rpartition(".")[2]: m for n, m in layer.named_modules()}
        return [modules[n].register_forward_hook(self._keeping(n)) for n in ("k_proj", "v_proj") if n in modules]

    def _keeping(self, name: str) -> Callable[..., None]:
        def keep(_: Any, arguments: tuple[Any, ...], out: Any) -> None:
            del arguments
            self._states[name] = out.reshape(-1, out.shape[-1])

        return keep

    def named(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """A layer's arguments, with this object as its cache."""
        if self.before:
            return dict(named)
        key = "past_key_value" if "past_key_value" in named else "past_key_values"
        return {**named, key: self}

    def update(self, keys: Any, values: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Act as an empty transformers cache: keys and values [1, G, T, D]."""
        for name, states in (("k_proj", keys), ("v_proj", values)):
            moved = states[0].transpose(0, 1)
            self._states[name] = moved.reshape(moved.shape[0], -1)
        return keys, values

    def finish_window(self) -> None:
        """Record the ranges of a finished window."""
        if set(self._states) != {"k_proj", "v_proj"}:
            raise UnsupportedError("its attention has no cache of keys and values to observe", hint="omit --kv")
        keys, values = (self._states.pop(n).float().numpy() for n in ("k_proj", "v_proj"))
        self.ranges.add(keys, values)


def _windows(
    tokenizer: Any, text: str | Sequence[str | Sequence[int]], windows: int, tokens: int
) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Token ids of each window. Raises InputError for fewer than 64 tokens in all."""

    def encoded(words: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.asarray(tokenizer(words, add_special_tokens=False)["input_ids"], np.int64)

    def refuse(count: int) -> None:
        if count < LEAST_INPUTS:
            raise InputError("too little text to calibrate on", expected=f"at least {LEAST_INPUTS} tokens", found=count)

    if isinstance(text, str):
        ids = encoded(text)
        refuse(len(ids))
        starts = np.linspace(0, max(0, len(ids) - tokens), min(windows, -(-len(ids) // tokens))).astype(int)
        return [ids[a : a + tokens] for a in starts]
    encoded_samples = [encoded(x) if isinstance(x, str) else np.asarray(x, np.int64) for x in text[:windows]]
    refuse(sum(len(ids[:tokens]) for ids in encoded_samples))
    return [ids[:tokens] for ids in encoded_samples if len(ids)]


def _adding(gathered: Gatherer) -> Callable[[Any, tuple[Any, ...]], None]:
    def add(_: Any, arguments: tuple[Any, ...]) -> None:
        x = arguments[0]
        gathered.add(np.ascontiguousarray(x.reshape(-1, x.shape[-1]).float().numpy()))

    return add
