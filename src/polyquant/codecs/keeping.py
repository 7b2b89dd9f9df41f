"""Which codecs can hold the codes of which: the rules of transcoding, and the table of ordered pairs.

A codec states its traits: what codes, scales and zero points it can store. `keeps(have, want)` compares two traits:

    exact        every weight keeps its value: equal codes, and the product code * scale is the same real number
    rounded      equal codes, but a scale (or a float bias) may have to be rounded
    impossible   the codes cannot be kept

A verdict may hold only under conditions on the values, such as zero points that are all 0; `met` tests them on the
scales and zero points of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from polyquant.ops import halves, small_floats
from polyquant.types import F32, ScaledFloats

__all__ = [
    "FLOAT_TYPES",
    "ROUNDABLE",
    "Condition",
    "Fate",
    "HoldsFloats",
    "HoldsIntegers",
    "Integers",
    "SmallFloats",
    "Tables",
    "Traits",
    "Verdict",
    "float_resolved",
    "keeps",
    "met",
    "resolved",
    "whole_zeros",
]

Dtype: TypeAlias = Literal["f16", "bf16", "f32"]
Tables: TypeAlias = tuple[F32, F32, F32 | None]
"""Scales, offsets and biases (None without) of some rows, float32 [rows, G]."""
FLOAT_TYPES: dict[str, np.dtype[Any]] = {
    "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32),
}  # fmt: skip
"""Scale dtype in a codec's name -> numpy dtype."""


@dataclass(frozen=True, slots=True)
class Integers:
    """The traits of a codec of affine integers.

    bits: width of a code, 2 to 8. group: columns per scale, 0 for the whole row. scale: dtype of the scales, and of
    biases. zero: "none", "integer" (from 0 to 2^bits - 1 as unsigned codes), or "bias" (a float added to code * scale,
    codes unsigned). tensor: one scale for the tensor. ordered: a group index per column. fixed: the scale includes that
    of the layer's inputs. ternary: the only codes are -1, 0 and 1. factors: each column has a separate factor.
    """

    bits: int
    group: int = 0
    scale: Dtype = "f16"
    zero: Literal["none", "integer", "bias"] = "none"
    tensor: bool = False
    ordered: bool = False
    fixed: bool = False
    ternary: bool = False
    factors: bool = False


@dataclass(frozen=True, slots=True)
class SmallFloats:
    """The traits of a codec of small floats with block scales.

    element: "e2m1", "e4m3" or "e5m2". scale: "e8m0" (powers of two), "e4m3", or a float dtype. block: rows and columns
    per scale, 0 for all of them. tensor: "" without a scale of the whole tensor, else how it applies: "multiplies" or
    "divides". finite: scale bytes as ggml reads them, each a finite value without a sign: e8m0 255 is 2^128, in e4m3
    the sign is ignored and 0x7F is 0. rows: rows for each scale of the tensor, those of one matrix of a stack; 0 for
    all rows.
    """

    element: Literal["e2m1", "e4m3", "e5m2"]
    scale: Literal["e8m0", "e4m3", "f16", "bf16", "f32"]
    block: tuple[int, int]
    tensor: Literal["", "multiplies", "divides"] = ""
    finite: bool = False
    rows: int = 0


Traits: TypeAlias = Integers | SmallFloats
_BYTES = ("e8m0", "e4m3")
"""Kinds of scales that are one byte."""


@runtime_checkable
class HoldsIntegers(Protocol):
    """A codec of affine integers."""

    @property
    def integers(self) -> Integers:
        """Its traits."""


@runtime_checkable
class HoldsFloats(Protocol):
    """A codec of small floats with block scales."""

    @property
    def floats(self) -> SmallFloats:
        """Its traits."""


class Fate(Enum):
    """The fate of the weights of a codec in another codec."""

    EXACT = "exact"
    ROUNDED = "rounded scale"
    IMPOSSIBLE = "impossible"


class Condition(Enum):
    """A condition on the scales and zero points of a weight under which a verdict is exact."""

    NO_ZEROS = "all zero points are 0"
    SCALES_FIT = "the scales fit the target's dtype"
    BIASES_FIT = "zero point * scale fits the target's dtype"
    WHOLE_ZEROS = "every bias is minus an integer from 0 to 2^bits - 1 times its scale"
    NO_BIASES = "every bias is minus 2^(bits - 1) times its scale"
    FOLDS = "the scale of the tensor times each scale is a scale of the target"
    RECIPROCAL = "the scale of the tensor is the reciprocal of its reciprocal in float32"
    POWERS = "every scale is a power of two"
    NO_NAN = "no scale byte is 255, NaN for some programs and 2^128 for others"
    UNSIGNED = "no scale is negative or NaN"


ROUNDABLE = frozenset({Condition.SCALES_FIT, Condition.BIASES_FIT, Condition.RECIPROCAL})
"""Conditions without which codes are kept and a scale is rounded; without the others, codes cannot be kept."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The fate of every weight that meets the conditions. why: the reason, for display."""

    fate: Fate
    why: str = ""
    conditions: tuple[Condition, ...] = ()

    def __str__(self) -> str:
        if self.fate is Fate.IMPOSSIBLE:
            return f"impossible: {self.why}"
        given = " and ".join(c.value for c in self.conditions)
        fate: str = self.fate.value
        return fate + (f" if {given}" if given else "") + (f" ({self.why})" if self.why else "")


def _impossible(why: str) -> Verdict:
    return Verdict(Fate.IMPOSSIBLE, why)


def keeps(have: Traits, want: Traits, columns: int | None = None) -> Verdict:
    """Compare traits. columns: K of the weight, which tells whether a group is the whole row; None: groups differ."""
    if isinstance(have, Integers) and isinstance(want, Integers):
        return _integers(have, want, columns)
    if isinstance(have, SmallFloats) and isinstance(want, SmallFloats):
        return _small_floats(have, want)
    return _impossible("integers and floats have different values")


def _integers(have: Integers, want: Integers, columns: int | None) -> Verdict:
    if (lack := _lack(have, want) or _grouping(have, want, columns)) is not None:
        return _impossible(lack)
    conditions = []
    if FLOAT_TYPES[have.scale] != FLOAT_TYPES[want.scale] and want.scale != "f32":
        conditions.append(Condition.SCALES_FIT)
    conditions += _zeros(have, want)
    return Verdict(Fate.EXACT, "", tuple(conditions))


def _lack(have: Integers, want: Integers) -> str | None:
    """The reason why the target cannot hold codes of this kind, with any groups; None if it can."""
    if have.factors or want.factors:
        return f"each column of the {'source' if have.factors else 'target'} has a separate factor"
    if want.ternary and not have.ternary:
        return "the target has the codes -1, 0 and 1 only"
    if want.bits < have.bits:
        return f"{want.bits} bits cannot hold {have.bits}-bit codes"
    if have.ordered and (not want.ordered or have.group != want.group):
        lacks = "other groups" if want.ordered else "no group index"
        return f"columns belong to groups in any order, and the target has {lacks}"
    if want.fixed and not have.fixed:
        return "the target's scale includes that of the layer's inputs, which the source does not have"
    return None


def _grouping(have: Integers, want: Integers, columns: int | None) -> str | None:
    """The reason why the target has too few scales; None if it has enough."""
    if want.tensor and not have.tensor:
        return "the target has one scale for the tensor"
    if have.tensor or want.group == have.group:
        return None
    have_size = have.group or columns
    want_size = want.group or columns
    if have.group and not want.group and (columns is None or have.group < columns):
        return "the target has one scale per row"
    if have_size is not None and want_size is not None and have_size % want_size:
        return f"the target has one scale per {want_size} columns, the source per {have_size}"
    return None


def _zeros(have: Integers, want: Integers) -> list[Condition]:
    if have.zero == "bias":
        return {"none": [Condition.NO_BIASES], "integer": [Condition.WHOLE_ZEROS], "bias": []}[want.zero]
    if want.zero == "none":
        return [Condition.NO_ZEROS] if have.zero == "integer" else []
    wide = want.scale == "f32" and have.scale != "f32"  # zero point * scale has at most 8 + 11 digits
    return [Condition.BIASES_FIT] if want.zero == "bias" and not wide else []


def _small_floats(have: SmallFloats, want: SmallFloats) -> Verdict:
    if have.element != want.element:
        return _impossible(f"{want.element} does not have the values of {have.element}")
    for size, fits in zip(have.block, want.block, strict=True):
        if fits != size and (fits == 0 or (size and size % fits)):
            return _impossible(f"the target has one scale per {_block(want)}, the source per {_block(have)}")
    if have.rows and want.tensor and (not want.rows or have.rows % want.rows):
        return _impossible("the matrices of the source have their own scales of the tensor")
    conditions = []
    folds = bool(have.tensor) and not want.tensor
    if want.scale not in (have.scale, "f32"):
        if want.scale == "e4m3" and have.scale == "e8m0":
            return _impossible(f"scales of {have.scale} are not scales of {want.scale}")
        conditions.append(Condition.POWERS if want.scale == "e8m0" else Condition.SCALES_FIT)
    elif have.finite != want.finite and have.scale in _BYTES:
        conditions.append(Condition.NO_NAN if have.scale == "e8m0" else Condition.UNSIGNED)
    if folds:
        conditions.append(Condition.FOLDS)
    elif have.tensor and have.tensor != want.tensor:
        conditions.append(Condition.RECIPROCAL)
    return Verdict(Fate.EXACT, "", tuple(conditions))


def _block(traits: SmallFloats) -> str:
    rows, columns = (str(n) if n else "all" for n in traits.block)
    return f"{rows} x {columns} weights"


def met(condition: Condition, have: Integers, want: Integers, scale: F32, offset: F32, bias: F32 | None) -> bool:
    """True if a weight's scales, offsets and biases [N, G] meet a condition for the target `want`."""
    if condition is Condition.NO_ZEROS:
        return not offset.any()
    if condition is Condition.SCALES_FIT:
        return _fits(scale, want.scale) and (bias is None or want.zero != "bias" or _fits(bias, want.scale))
    if condition is Condition.BIASES_FIT:
        zero = offset + np.float32(2 ** (want.bits - 1))
        short = have.scale != "f32"  # at most 8 and 11 digits, 19 in the product
        return (short or _exact_product(zero, scale)) and _fits(-zero * scale, want.scale)
    assert bias is not None
    zeros = whole_zeros(scale, bias)
    if condition is Condition.NO_BIASES:
        return zeros is not None and bool((zeros == 2 ** (have.bits - 1)).all())
    return zeros is not None and bool(((zeros >= 0) & (zeros < 2**want.bits)).all())


def whole_zeros(scale: F32, bias: F32) -> F32 | None:
    """Integers z with bias = -z * scale exactly, float32 [N, G]; None if there are none."""
    with np.errstate(all="ignore"):
        zeros = np.rint(-bias.astype(np.float64) / np.where(scale == 0, 1, scale))
    exact = (-zeros * scale.astype(np.float64) == bias) & np.isfinite(zeros)
    return zeros.astype(np.float32) if exact.all() else None


def _exact_product(a: F32, b: F32) -> bool:
    with np.errstate(all="ignore"):
        return bool((a.astype(np.float64) * b.astype(np.float64) == (a * b).astype(np.float64)).all())


def _fits(values: F32, dtype: str) -> bool:
    stored, _ = halves.narrow(values, FLOAT_TYPES[dtype])
    return bool((halves.widen(stored) == values).all())


def float_met(condition: Condition, want: SmallFloats, codes: ScaledFloats) -> bool:
    """True if the scales of a weight (its codes are not used) meet a condition for the target `want`."""
    scale, tensor = codes.scale, codes.tensor
    if condition is Condition.NO_NAN:
        return not (scale == 255).any()
    if condition is Condition.UNSIGNED:
        return not (scale >= 0x7F).any()
    if condition is Condition.RECIPROCAL:
        assert tensor is not None
        with np.errstate(all="ignore"):
            back = np.float32(1) / (np.float32(1) / tensor)
        return bool((back == tensor).all())
    wide = codes_scales(codes)
    if condition is Condition.FOLDS:
        assert tensor is not None
        with np.errstate(all="ignore"):
            exact = wide / tensor.astype(np.float64) if codes.divides else wide * tensor.astype(np.float64)
            product = exact.astype(np.float32)
        return bool((product == exact).all()) and _held(product, want.scale)
    return _held(wide.astype(np.float32), want.scale)


def codes_scales(codes: ScaledFloats) -> NDArray[np.float64]:
    """The block scales as numbers, float64 [R, C]."""
    scale: NDArray[Any] = small_floats.values(codes.kind)[codes.scale] if codes.scale.dtype == np.uint8 else codes.scale
    return scale.astype(np.float64)


def _held(values: F32, kind: str) -> bool:
    """True if a kind of scale has these values."""
    if kind in _BYTES:
        return bool(np.isin(values, small_floats.values(kind)).all())
    return _fits(values, kind)


_V = TypeVar("_V")
_KNOWN: ContextVar[dict[tuple[int, str], tuple[object, Any]] | None] = ContextVar("verdicts", default=None)


@contextmanager
def verdicts_kept() -> Iterator[None]:
    """Within the block, decide each weight and target once: a plan asks several times, and each answer reads all
    scales. Weights must not change meanwhile.
    """
    token = _KNOWN.set({})
    try:
        yield
    finally:
        _KNOWN.reset(token)


def once(weight: object, target: str, decide: Callable[[], _V]) -> _V:
    """decide(), or its answer for this weight and target earlier in a block of `verdicts_kept`."""
    known = _KNOWN.get()
    if known is None:
        return decide()
    key = id(weight), target
    if key not in known:
        known[key] = weight, decide()  # the weight is kept, so that its id stays its own
    answer: _V = known[key][1]
    return answer


def float_resolved(verdict: Verdict, want: SmallFloats, codes: ScaledFloats) -> Verdict:
    """The verdict for one weight with these scales, without conditions."""
    return _without_conditions(verdict, [c for c in verdict.conditions if not float_met(c, want, codes)])


def resolved(verdict: Verdict, have: Integers, want: Integers, tables: Iterable[Tables]) -> Verdict:
    """The verdict for one weight, without conditions. tables: those of all its rows, some rows at a time."""
    true = list(verdict.conditions)
    for some in tables:
        true = [c for c in true if met(c, have, want, *some)]
    return _without_conditions(verdict, [c for c in verdict.conditions if c not in true])


def _without_conditions(verdict: Verdict, failed: list[Condition]) -> Verdict:
    if not failed:
        return replace(verdict, conditions=())
    why = "; ".join(f"not true: {c.value}" for c in failed)
    if all(c in ROUNDABLE for c in failed):
        return Verdict(Fate.ROUNDED, why)
    return _impossible(why)
