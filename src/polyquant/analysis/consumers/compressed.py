"""The settings of compressed-tensors: config groups with the arguments of weights and activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from polyquant.analysis.consumers.model import integer

__all__ = ["Arguments", "Group", "groups"]


@dataclass(frozen=True, slots=True)
class Arguments:
    """Quantization arguments of weights or activations, with the defaults of compressed-tensors."""

    bits: int
    kind: str
    strategy: str
    group: int | None
    symmetric: bool
    dynamic: bool
    actorder: str | None
    byte_scales: bool

    def __str__(self) -> str:
        group = f" {self.group}" if self.group else ""
        symmetric = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.kind}{self.bits} {self.strategy}{group} {symmetric}{' dynamic' if self.dynamic else ''}"


@dataclass(frozen=True, slots=True)
class Group:
    """One config group. form: its format, or that of all; fields without meaning are None."""

    name: str
    form: str
    weights: Arguments
    inputs: Arguments | None
    outputs: Arguments | None

    def __str__(self) -> str:
        return f"{self.form}, weights {self.weights}, activations {self.inputs or 'not quantized'}"


def groups(settings: Mapping[str, Any]) -> Iterator[Group]:
    """The config groups that quantize weights of layers."""
    listed = settings.get("config_groups")
    overall = settings.get("format")
    for name, group in listed.items() if isinstance(listed, Mapping) else ():
        if not isinstance(group, Mapping):
            continue
        weights = _arguments(group.get("weights"))
        if weights is None:
            continue
        form = group.get("format") or overall
        yield Group(
            str(name),
            form if isinstance(form, str) else "",
            weights,
            _arguments(group.get("input_activations")),
            _arguments(group.get("output_activations")),
        )


def _arguments(values: object) -> Arguments | None:
    if not isinstance(values, Mapping):
        return None
    group = integer(values, "group_size")
    strategy, kind, order = values.get("strategy"), values.get("type"), values.get("actorder")
    if not isinstance(strategy, str):  # compressed-tensors infers it
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    return Arguments(
        integer(values, "num_bits") or 8,
        kind if isinstance(kind, str) else "int",
        strategy,
        group,
        values.get("symmetric", True) is not False,
        bool(values.get("dynamic", False)),
        order if isinstance(order, str) else None,
        "uint8" in str(values.get("scale_dtype")),
    )
