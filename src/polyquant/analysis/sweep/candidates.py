"""Candidates of a sweep by short names, and the order in which they are measured.

q4_k_m, mine.toml          a recipe
q4_k, w8a8.dynamic         a codec, in the first format that stores it
trellis:3, trellis:2.5     a format (or the start of its name) and a number: bits, or with a point --target-bpw
hf:bf16                    a format and a recipe or codec
trellis:3:effort=max       options of the format, as on the command line without dashes
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyquant.analysis.inspect import Inspection
from polyquant.conversion.convert import targets
from polyquant.errors import InputError, PlanError, UnknownNameError
from polyquant.formats.protocol import DeclaresCodecs, Format, Target
from polyquant.options import Option, options_of
from polyquant.recipes.reading import builtin_recipes, load_recipe
from polyquant.registry import DEFAULT_TARGET, codec, known_codecs
from polyquant.types import Ternary

__all__ = ["Candidate", "bits_range", "file_path", "informative_order", "ladder", "parse_candidate"]

_TERNARY = ("i2_s", "tq2_0", "tq1_0")
_SMALL = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "iq4_xs", "q3_k_m")
_LARGE = ("q8_0", "q5_k_m", "q4_k_m", "iq4_xs", "q3_k_m", "q2_k")
_HUGE = ("q6_k", "q4_k_m", "iq4_xs", "q3_k_m", "q2_k", "q2_k_s")
_LADDERS = ((3e9, _SMALL), (30e9, _LARGE), (math.inf, _HUGE))
"""Most weights of a model, and its default candidates: large models tolerate fewer bits."""
_BITS, _BPW, _TO, _CALIBRATION, _IMPORTANCE = "bits", "target_bpw", "to", "calibration", "importance"
_MOST = 64
"""Candidates of a range."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One quantization. options: keywords of `convert`, with `to`; suffix: of the output's name, "" for a folder."""

    name: str
    options: Mapping[str, Any]
    suffix: str

    @property
    def file_name(self) -> str:
        """Name of the output in the work folder."""
        return re.sub(r"[^A-Za-z0-9._+=-]+", "-", self.name).strip("-.") + self.suffix

    @property
    def key(self) -> str:
        """A hash of the options and the content of the files that they name."""
        h = hashlib.sha256(json.dumps(self.options, sort_keys=True).encode())
        for value in self.options.values():
            if isinstance(value, str) and Path(value).is_file():
                h.update(hashlib.sha256(Path(value).read_bytes()).digest())
        return h.hexdigest()

    @property
    def family(self) -> str:
        """The key without the target size: measurements of a plan are shared by candidates of one family."""
        return self.without(_BPW).key

    def without(self, option: str) -> Candidate:
        """The same candidate without an option."""
        return replace(self, options={k: v for k, v in self.options.items() if k != option})

    @property
    def shares_plan(self) -> bool:
        """True if the plan measures the model for a target size."""
        return _BPW in self.options

    def command(self, source: str) -> str:
        """The command that makes this candidate alone."""
        words = ["polyquant", "quantize", source, f"OUT{self.suffix}"]
        flags = {"recipe": "--recipe", "codec": "--codec", _IMPORTANCE: "--importance", _TO: "--to"}
        known = _target_options(self.options[_TO])
        for name, value in self.options.items():
            flag = flags.get(name) or (known[name].flag if name in known else f"--{name.replace('_', '-')}")
            if name == _TO and self.suffix:
                continue
            words += [flag] if value is True else [flag, str(value)]
        return shlex.join(words)


def parse_candidate(
    text: str, *, calibration: str | None = None, importance: str | None = None, requantize: bool = False
) -> Candidate:
    """Parse a short name. calibration, importance: files for candidates whose format uses them; requantize: allow it.

    Raises UnknownNameError with similar names, PlanError.
    """
    head, *rest = text.split(":")
    settings = [word for word in rest if "=" in word]
    plain = [word for word in rest if "=" not in word]
    form = _format(head) if plain else None
    if len(plain) > 1 or (plain and form is None):
        names = ", ".join(dict.fromkeys(f.name.partition("-")[0] for f, _ in targets()))
        raise PlanError(
            f"not a candidate: '{text}'", expected="a recipe, a codec or FORMAT:BITS, e.g. trellis:3",
            hint=f"formats are {names}",
        )  # fmt: skip
    choice = _choice(plain[0] if plain else head, form)
    pair = form or _storing(choice)
    form_name, target = pair[0].name, pair[1]
    known = options_of(target.options)
    for name in (_BITS, _BPW):
        if name in choice and name not in known:
            raise PlanError(f"{pair[0].title} take no number of bits", found=text, hint="name a recipe or a codec")
    options = {**choice, **dict(_setting(word, known, text) for word in settings)}
    if _CALIBRATION in known:
        options |= {_CALIBRATION: calibration} if calibration is not None else {}
    elif importance is not None:
        options[_IMPORTANCE] = importance
    options |= {"requantize": True} if requantize else {}
    return Candidate(text, {**options, _TO: form_name}, target.suffix)


def _format(word: str) -> tuple[Format, Target] | None:
    """The writable format of that name, or whose name begins so."""
    found = [(f, t) for f, t in targets() if word.lower() in (f.name, f.name.partition("-")[0])]
    return found[0] if found else None


def _choice(word: str, form: tuple[Format, Target] | None) -> dict[str, Any]:
    """The option that selects the codecs."""
    if form is not None and re.fullmatch(r"\d{1,3}", word):
        return {_BITS: int(word)}
    if form is not None and re.fullmatch(r"\d{1,3}\.\d{1,4}", word):
        return {_BPW: float(word)}
    if word.lower().endswith(".toml") or word.lower() in builtin_recipes():
        load_recipe(word)
        return {"recipe": word}
    try:
        return {"codec": codec(word).name}
    except UnknownNameError:
        raise UnknownNameError("recipe or codec", word, [*builtin_recipes(), *known_codecs()]) from None


def _storing(choice: Mapping[str, Any]) -> tuple[Format, Target]:
    """The format for a recipe or codec: one that claims it, else the first that stores it, single files first."""
    every = targets()
    if (claiming := next((pair for pair in every if pair[1].claims(choice)), None)) is not None:
        return claiming
    base = choice.get("codec") or load_recipe(choice["recipe"]).base
    for pair in sorted(every, key=lambda pair: not pair[1].suffix):
        if base is None or (isinstance(pair[0], DeclaresCodecs) and pair[0].writes(codec(base))):
            return pair
    return next(pair for pair in every if pair[0].name == DEFAULT_TARGET)


def _target_options(name: str) -> Mapping[str, Option]:
    return next(options_of(target.options) for form, target in targets() if form.name == name)


def _setting(word: str, known: Mapping[str, Option], text: str) -> tuple[str, Any]:
    """Parse KEY=VALUE. Raises PlanError."""
    key, _, value = word.partition("=")
    name = key.replace("-", "_")
    if name not in known:
        shown = ", ".join(n.replace("_", "-") for n in known) or "no options"
        raise PlanError(f"unknown option '{key}' in '{text}'", expected=shown)
    option = known[name]
    try:
        parsed: Any = option.parse(value) if option.parse is not None else value
        if option.parse is None and option.type is bool:
            parsed = {"true": True, "false": False}[value.lower()]
        elif option.parse is None and option.type in (int, float):
            parsed = option.type(value)
    except (KeyError, ValueError):
        raise PlanError(f"'{word}' in '{text}' is not a value of this option", expected=option.help) from None
    if option.choices and parsed not in option.choices:
        raise PlanError(f"unknown value in '{text}'", expected=", ".join(option.choices), found=value)
    return name, (parsed,) if option.multiple else parsed


def bits_range(text: str, step: float = 0.5) -> list[str]:
    """Names of the candidates of "2.5..5", or of one number: a target size in bits per weight. Raises PlanError."""
    match = re.fullmatch(r"(\d{1,2}(?:\.\d{1,4})?)(?:\.\.(\d{1,2}(?:\.\d{1,4})?))?", text.strip())
    low, high = (float(match[1]), float(match[2] or match[1])) if match else (1.0, 0.0)
    if not low <= high or not step > 0:
        raise PlanError("not a range of bits per weight", expected="LOW..HIGH, e.g. 2.5..5", found=text)
    count = math.floor((high - low) / step + 1e-9) + 1
    if count > _MOST:
        raise PlanError("too many candidates in the range", expected=f"at most {_MOST}", found=count)
    allocating = [f.name.partition("-")[0] for f, target in targets() if _BPW in options_of(target.options)]
    numbers = (f"{round(low + i * step, 4):.10g}" for i in range(count))
    return [f"{name}:{n if '.' in n else n + '.0'}" for n in numbers for name in allocating]


def ladder(source: Inspection) -> tuple[str, ...]:
    """Default candidates for a model: ternary types for ternary weights, else recipes from large to small."""
    if any(w.codec.form is Ternary for w in source.tensors):
        return _TERNARY
    return next(names for most, names in _LADDERS if source.weights < most)


def informative_order(sizes: Sequence[float]) -> list[int]:
    """Indices in the order of measurement: the middle size, the ends, then always the size farthest from those done.

    A sweep that stops early has then covered the range of sizes.
    """
    if any(not size > 0 for size in sizes):
        raise InputError("a size is not positive", found=min(sizes))
    logs = [math.log(size) for size in sizes]
    left = sorted(range(len(sizes)), key=lambda i: logs[i])
    order = [left.pop(i) for i in (len(left) // 2, 0, -1) if left]
    while left:
        far = max(left, key=lambda i: min(abs(logs[i] - logs[j]) for j in order))
        order.append(far)
        left.remove(far)
    return order


def file_path(path: str | os.PathLike[str] | None) -> str | None:
    """The absolute path of an existing file: a child process has it in its request. Raises InputError."""
    if path is None:
        return None
    if not Path(path).is_file():
        raise InputError("no such file", file=path)
    return str(Path(path).absolute())
