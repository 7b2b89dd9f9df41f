"""Experts that a transformers folder stores in two tensors per layer: gate and up joined, and down.

    mlp.experts.gate_up_proj            [experts, 2 * width, hidden] (Qwen3.5, Gemma 4, Granite's input_linear), or its
                                        transpose (Llama 4), or with rows that alternate (gpt-oss)
    mlp.experts.down_proj               [experts, hidden, width]

Two other layouts exist: stacks of gate, up and down (mlx-lm, architectures/mlx_writing.py), and one matrix per expert
(vLLM's quantized checkpoints, architectures/separate_experts.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from polyquant.operations import Concat, Interleave, Operation, Slice, Stack, Transpose, chain, steps_of
from polyquant.types import TensorMap

__all__ = ["BLOCKS", "Fused", "Kind", "Part", "stacks_of"]

BLOCKS = "_blocks"
"""End of the names of MXFP4 blocks, whose rows are outputs in every family."""
Part: TypeAlias = Literal["gate", "up", "down"]
Kind: TypeAlias = Literal["weight", "bias"]


@dataclass(frozen=True, slots=True)
class Fused:
    """The layout of a layer's experts in the folders of a family.

    joined, down: names inside a layer. stack: of mlx-lm's stacks, without `.gate_proj`. matrix: name of one matrix in
    quantized checkpoints, with {e} for the expert and {part} for one of `parts`. transposed: floats are [experts, in,
    out]. alternate: rows of gate and up alternate.
    """

    joined: str
    down: str
    stack: str
    matrix: str
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    transposed: bool = False
    alternate: bool = False

    def stacked(self, part: Part, kind: Kind) -> str:
        """Name inside a layer of a stack in mlx-lm's folders."""
        return f"{self.stack}.{part}_proj.{kind}"

    def separate(self, part: Part, kind: Kind, expert: int | str) -> str:
        """Name inside a layer of one expert's matrix or bias."""
        word = self.parts[("gate", "up", "down").index(part)]
        return f"{self.matrix.format(e=expert, part=word)}.{kind}"


def stacks_of(tensor: TensorMap, fused: Fused) -> Iterator[tuple[str, Part, Kind, TensorMap]]:
    """Yield (name up to the layer's tensors, part, kind, map of the stack) of the stacks [experts, out, in] in a fused
    tensor, or [experts, out] in its biases; nothing for other tensors.
    """
    for name in (fused.joined, fused.down):
        for end, kind in (("", "weight"), (BLOCKS, "weight"), ("_bias", "bias")):
            stem = tensor.target.removesuffix(f".{name}{end}")
            if stem == tensor.target or len(tensor.shape) != (2 if kind == "bias" else 3):
                continue
            transposed = fused.transposed and not end
            parts: tuple[Part, ...] = ("gate", "up") if name == fused.joined else ("down",)
            maps = _apart(tensor, len(parts), alternate=fused.alternate, transposed=transposed)
            for part, stack in zip(parts, maps, strict=True):
                yield stem, part, "bias" if kind == "bias" else "weight", stack
            return


def _apart(tensor: TensorMap, count: int, *, alternate: bool, transposed: bool) -> list[TensorMap]:
    """The whole tensor, or its two halves along the outputs.

    alternate: their rows alternate. transposed: [experts, in, out] becomes [experts, out, in].
    """
    steps, shape, sources = steps_of(tensor.op), tensor.shape, tensor.sources
    if len(sources) == count * shape[0] > count and steps and steps[0] in (Stack(), Concat(0)):  # separate matrices
        shape = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
        part = (shape[0], shape[1] // count, *shape[2:])
        return [replace(tensor, sources=sources[i::count], shape=part, op=Stack()) for i in range(count)]
    if transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
        steps = steps[:-1] if steps and steps[-1] == Transpose() else (*steps, Transpose())
    if count == 1:
        return [replace(tensor, shape=shape, op=chain(*steps))]
    joined: Operation = Interleave(1) if alternate else Concat(1)
    half, out = shape[1] // 2, list[TensorMap]()
    for i in range(2):
        if steps and steps[0] == joined and len(sources) == 2:
            chosen, op = sources[i : i + 1], chain(*steps[1:])
        else:
            piece = Slice(i, shape[1], 2, 1) if alternate else Slice(i * half, (i + 1) * half, 1, 1)
            chosen, op = sources, chain(*steps, piece)
        out.append(replace(tensor, sources=chosen, shape=(shape[0], half, *shape[2:]), op=op))
    return out
