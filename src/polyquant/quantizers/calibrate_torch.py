"""Calibration through transformers, for architectures that our own decoder does not know.

The model is loaded whole, in the dtype of its files, and runs once on each window to show what its layers (the longest list of modules of one class)
are told besides the states; then they run one after the other over the states of all windows, and only the Hessians of one layer are held. Experts whose weights lie stacked in one tensor are no linear layers, and what
stands outside the layers has no stage: such weights are not calibrated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polyquant.errors import InputError, UnsupportedError
from polyquant.quantizers.calibrate import LEAST_INPUTS, Moments, Tick

__all__ = ["TorchStages"]


class TorchStages:
    """A model of transformers: a stage for each layer. Raises UnsupportedError where it has no layers of one class, InputError for too little text."""

    def __init__(self, path: str | os.PathLike[str], text: str, *, windows: int, tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch: Any = torch
        folder = os.fspath(path)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        except (OSError, ValueError, KeyError) as problem:
            raise UnsupportedError(
                f"transformers does not load it either: {str(problem).splitlines()[0]}",
                file=path,
                hint="use --method trellis_viterbi, which needs no inputs",
            ) from problem
        lists = [(n, m) for n, m in self.model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 0]
        same = [(n, m) for n, m in lists if len({type(x) for x in m}) == 1 and ".layers." not in n]
        if not same:
            raise UnsupportedError(
                "its layers are no list of one class", file=path, hint="use --method trellis_viterbi"
            )
        self._prefix, self._layers = max(same, key=lambda pair: len(pair[1]))
        ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
        if len(ids) < LEAST_INPUTS:
            raise InputError(
                "too little text to calibrate on", expected=f"at least {LEAST_INPUTS} tokens", found=len(ids)
            )
        starts = np.linspace(0, max(0, len(ids) - tokens), min(windows, -(-len(ids) // tokens))).astype(int)
        self._windows = [torch.tensor(ids[a : a + tokens])[None] for a in starts]
        self._calls: list[_Calls] = []

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
        with self._torch.no_grad():
            if index == 0:
                self._calls = [self._calls_of(window) for window in self._windows]
            layer, moments, hooks = self._layers[index], {}, []
            for name, module in layer.named_modules():
                full = f"{self._prefix}.{index}.{name}.weight"
                if full in wanted:
                    moments[full] = Moments(module.weight.shape[1])
                    hooks.append(module.register_forward_pre_hook(_adding(moments[full])))
            try:
                for i, calls in enumerate(self._calls):
                    out = layer(calls.states, *calls.arguments[index], **calls.named[index])
                    calls.states = out[0] if isinstance(out, tuple) else out
                    tick((i + 1) / len(self._calls))
            finally:
                for hook in hooks:
                    hook.remove()
        return moments

    def _calls_of(self, window: Any) -> _Calls:
        """What the model gives its layers for a window: the whole model runs once, since masks may differ from layer to layer."""
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
            raise UnsupportedError("its layers do not run one after the other", hint="use --method trellis_viterbi")
        return calls


class _Calls:
    """One window: the states that the next layer reads, and what each layer is told besides."""

    def __init__(self) -> None:
        self.states: Any = None
        self.arguments: list[tuple[Any, ...]] = []
        self.named: list[dict[str, Any]] = []


def _adding(moments: Moments) -> Callable[[Any, tuple[Any, ...]], None]:
    def add(_: Any, arguments: tuple[Any, ...]) -> None:
        x = arguments[0]
        moments.add(np.ascontiguousarray(x.reshape(-1, x.shape[-1]).float().numpy()))

    return add
