"""The Mamba-2 mixer (Dao and Gu 2024) as a part of a layer (parts.py), with its tensors and sizes; also used by
hybrids.

    [z, x, B, C, dt] = In h;  [x, B, C] = silu(conv1d([x, B, C]))
    s = exp(dt a) s + dt B x;  y = C s + d x;  Out norm(y * silu(z))

GGUF holds a = -exp(A_log) and d as columns [heads, 1], the convolution kernel as [channels, k], and the norm as
[groups, inner / groups].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from polyquant.architectures.changes import Column, Decay, Groups, Squeezed
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.hyper_table import Key
from polyquant.architectures.parts import Feed
from polyquant.errors import InputError
from polyquant.types import Shape

__all__ = ["ANY_CONTEXT", "MIXER_CHANGES", "NO_ROPE", "Mixer", "in_pieces", "mixer_exact", "mixer_stems", "product",
    "ssm_keys"]  # fmt: skip

MIXER_CHANGES = {
    "ssm_a": Decay(),
    "ssm_d": Column,
    "ssm_conv1d": Squeezed,
    "ssm_norm": Groups(lambda hyper: hyper.count("ssm_groups")),
}
ANY_CONTEXT = 1 << 20
"""The context that llama.cpp's converter writes for models with an unlimited context."""
NO_ROPE: dict[str, dict[str, Any]] = {
    "rope_theta": {"config": (), "write": "never"},
    "rotated": {"config": (), "gguf": None},
}
"""Changed rows of a model without positions."""


@dataclass(frozen=True, slots=True)
class Mixer:
    """The Mamba-2 mixer after a norm.

    optional_norm: some models have no norm before the output matrix. That norm follows the gate, unless Hyper's
    norm_before_gate is not 0.
    """

    norm: str = "attn_norm"
    optional_norm: bool = False
    runtime: ClassVar[str] = "polyquant.runtime.state_space:StateSpace"

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """See parts.Part."""
        return Feed(self.norm, ("ssm_in",), "norm"), Feed("ssm_in", ("ssm_out",), "activation")

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See parts.Part."""
        inner, heads = hyper.count("ssm_inner"), hyper.count("ssm_heads")
        rows = inner + self.channels(hyper) + heads
        return {self.norm: (hyper.hidden,), "ssm_in": (rows, hyper.hidden), "ssm_out": (hyper.hidden, inner)}

    def parameters(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See parts.Part. Raises InputError if heads and groups do not divide."""
        inner, heads, groups = (hyper.count(f"ssm_{name}") for name in ("inner", "heads", "groups"))
        if not heads or not groups or inner % heads or heads % groups:
            raise InputError(
                "heads of the state space do not divide", expected=f"multiples of {groups}", found=[heads, inner]
            )
        return {
            "ssm_conv1d.weight": (self.channels(hyper), hyper.count("ssm_conv")),
            "ssm_dt.bias": (heads,),
            "ssm_a": (heads, 1),
            "ssm_d": (heads, 1),
            "ssm_norm.weight": (groups, inner // groups),
        }

    def channels(self, hyper: Hyper) -> int:
        """Return the channels of the convolution: x, B and C."""
        return hyper.count("ssm_inner") + 2 * hyper.count("ssm_groups") * hyper.count("ssm_state")


def mixer_stems(prefix: str) -> dict[str, str]:
    """Return the stems of a mixer whose Hugging Face names start with this prefix."""
    return {
        f"{prefix}.conv1d": "ssm_conv1d",
        f"{prefix}.in_proj": "ssm_in",
        f"{prefix}.norm": "ssm_norm",
        f"{prefix}.out_proj": "ssm_out",
    }


def mixer_exact(prefix: str) -> dict[str, str]:
    """Return its tensors that are not called weight or bias."""
    return {f"{prefix}.A_log": "ssm_a", f"{prefix}.D": "ssm_d", f"{prefix}.dt_bias": "ssm_dt.bias"}


def ssm_keys(
    *, conv: str, state: str, groups: str, heads: str, inner: Callable[[Mapping[str, Any]], Any],
    inner_entry: str | None = None
) -> tuple[Key, ...]:  # fmt: skip
    """Return the rows of the mixer sizes, from these config.json entries.

    inner: config.json -> width of the mixer. inner_entry: the entry that the width is written to.
    """
    return (
        Key("ssm_conv", (conv,), "ssm.conv_kernel"),
        Key("ssm_inner", (inner_entry,) if inner_entry else (), "ssm.inner_size", read=inner),
        Key("ssm_state", (state,), "ssm.state_size"),
        Key("ssm_heads", (heads,), "ssm.time_step_rank"),
        Key("ssm_groups", (groups,), "ssm.group_count", default=1),
    )


def product(*entries: str) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function from config.json to the product of these entries, None if one is missing or not a number."""

    def read(config: Mapping[str, Any]) -> Any:
        out: int | float = 1
        for entry in entries:
            value = config.get(entry)
            if not isinstance(value, int | float) or isinstance(value, bool):
                return None
            out = out * value
        return out

    return read


def in_pieces(head_dim: str, expand: str) -> Callable[[Hyper], dict[str, Any]]:
    """Return a function from Hyper to config.json's form of the mixer width: head size and expansion factor."""

    def entries(hyper: Hyper) -> dict[str, Any]:
        inner = hyper.count("ssm_inner")
        wider = inner / hyper.hidden
        return {
            head_dim: inner // max(hyper.count("ssm_heads"), 1),
            expand: int(wider) if wider.is_integer() else wider,
        }

    return entries
