"""What every format promises. A package that brings one calls both from its own tests, with the object and a small model:

    def test_format():
        check_format(MY_FORMAT, sample, foreign=[a_gguf_file, a_folder_of_another_format])

    def test_target():
        check_target(MY_FORMAT, a_float_model, codec="my_codec")

check_format: what it says of itself, and on a sound sample
    names      a name, a title, a priority; options are a frozen dataclass whose fields carry help; findings have a code and an explanation
    sniff      knows the sample by content, under another name too; None for foreign, empty, cut and missing paths, without raising
    open       states format and naming; sizes are those of the codecs; every weight decodes
    check      no error on the sample, only findings that are explained
    broken     copies that are cut or changed: `open` raises PolyquantError or nothing else, `check` raises nothing and finds what `open` refuses
    own_files  never a model card, never what is not there

check_target: a conversion into it
    options    as above; `smaller` and `claims` speak of options that exist; sizes, places and bytes are the plan's, twice the same
    values     what is written opens again; each tensor is as far from its source as the report says; `validate` finds no error
    target     exists: refused, or overwritten; back in a Hugging Face folder the numbers are equal
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from polyquant import registry
from polyquant.analysis.compare import compare
from polyquant.analysis.validate import validate
from polyquant.capabilities import Opaque
from polyquant.conversion.convert import convert, plan
from polyquant.conversion.steps import Plan, with_name
from polyquant.errors import PlanError, PolyquantError
from polyquant.formats.protocol import Format
from polyquant.opening import detect, open_as, open_checkpoint
from polyquant.options import DeclaresTargetOptions, options_of
from polyquant.testing.refusals import refused
from polyquant.types import Checkpoint, Evidence, Finding, Floats, Severity

__all__ = ["check_format", "check_target"]

_CODE = re.compile(r"[A-Z]{2,6}\d{3}")
_FOREIGN_FILES = ("README.md", "LICENSE", "notes.txt", ".gitattributes", "results.csv")
_ROUNDS = 12
"""Broken copies of each kind."""


def check_format(form: Format, sample: Path, foreign: Sequence[Path] = (), *, seed: int = 0) -> None:
    """Everything above. sample: a sound checkpoint of a few megabytes at most; foreign: checkpoints of other formats. Raises AssertionError."""
    _check_names(form)
    _check_sniff(form, sample, foreign)
    _check_opening(form, sample)
    _check_findings(form, sample)
    _check_broken(form, sample, seed)
    _check_own_files(form, sample)


def check_target(form: Format, source: Path, **options: Any) -> None:
    """Everything above. form: of the registry. source: a small float model in a Hugging Face folder; options: as for polyquant.convert. Raises AssertionError."""
    target = form.target
    assert target is not None, f"{form.title} are only read"
    assert any(f.name == form.name for f in registry.formats()), (
        f"no entry point or line in the registry for '{form.name}'"
    )
    _check_options(target.options)
    assert not target.claims({}), "no option asked for this target"
    known = {"codec", "recipe", *options_of(target.options)}
    assert set(target.smaller) <= known, f"`smaller` has unknown options: {set(target.smaller) - known}"
    assert target.naming, "a naming scheme"
    with tempfile.TemporaryDirectory() as folder:
        _check_conversion(form, source, Path(folder), target.suffix, options)


# ---------------------------------------------------------------- what a format says of itself


def _check_names(form: Format) -> None:
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*", form.name), f"a name for --to: {form.name!r}"
    assert form.title.isprintable() and form.title.strip(), "a title for messages"
    assert isinstance(form.priority, int) and not isinstance(form.priority, bool)
    _check_options(form.open_options)
    if isinstance(form, DeclaresTargetOptions):
        said = None if form.target is None else form.target.options
        assert form.target_options is said, f"target_options are {form.target_options}, those of the target {said}"
    for code, text in form.findings.items():
        assert _CODE.fullmatch(code), f"letters and three digits: {code!r}"
        assert len(text) > 20 and text.isprintable(), f"{code}: say what it means, what breaks, what to do"
    others = [f for f in registry.formats() if f.name != form.name]
    for other in others:
        assert not set(other.findings) & set(form.findings), f"codes of {other.name}"


def _check_options(cls: type) -> None:
    assert is_dataclass(cls), f"{cls.__name__} is no dataclass"
    assert cls.__dataclass_params__.frozen, f"{cls.__name__} is not frozen"  # type: ignore[attr-defined]
    for field in fields(cls):
        given = field.default is not MISSING or field.default_factory is not MISSING
        assert given, f"{cls.__name__}.{field.name} has no default"
    for name, option in options_of(cls).items():
        assert option.help.strip() and option.help.isprintable(), f"{name} has no help"
        assert option.flag == "" or option.flag.startswith("--"), option.flag


# ---------------------------------------------------------------- recognising


def _check_sniff(form: Format, sample: Path, foreign: Sequence[Path]) -> None:
    found = form.sniff(sample)
    assert isinstance(found, Evidence) and found.why.strip(), f"{sample} is not recognised, or nothing says why"
    if any(f.name == form.name for f in registry.formats()):
        assert detect(sample)[0].name == form.name, f"{detect(sample)[0].name} takes it first: a higher priority"
    for path in foreign:
        assert form.sniff(path) is None, f"takes {path} for its own"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        empty, text, inside = folder / "empty", folder / "text.txt", folder / "folder"
        empty.touch()
        text.write_text("no weights here\n", encoding="utf-8")
        inside.mkdir()
        for path in (empty, text, inside, folder / "missing", folder / "missing" / "deeper", text / "below"):
            assert form.sniff(path) is None, f"takes {path.name} for its own"
        if sample.is_file():
            other = folder / "other.name"
            shutil.copyfile(sample, other)
            assert form.sniff(other) is not None, "recognised by its name, not by its content"
            lying = folder / f"text{sample.suffix}"
            lying.write_text("no weights here\n", encoding="utf-8")
            assert form.sniff(lying) is None, "recognised by its name, not by its content"


# ---------------------------------------------------------------- opening


def _open(form: Format, path: Path) -> Checkpoint:
    return open_as(form, path, {})


def _check_opening(form: Format, sample: Path) -> None:
    opened = _open(form, sample)
    assert opened.format == form.name, (opened.format, form.name)
    assert opened.naming and opened.path == sample, (opened.naming, opened.path)
    assert all(path.is_file() for path in opened.files.values()), "files that travel along must be there"
    for name, weight in opened.items():
        assert weight.name == name, (weight.name, name)
        if isinstance(weight.codec, Opaque):
            continue
        specs = weight.codec.specs(weight.shape)
        assert {k: a.spec.nbytes for k, a in weight.arrays.items()} == {k: s.nbytes for k, s in specs.items()}, name
        assert weight.nbytes == sum(s.nbytes for s in specs.values()), name
        if opened.undecoded is None:
            numbers = weight.dequantize()
            assert numbers.dtype == np.float32 and numbers.shape == weight.shape, (name, numbers.dtype, numbers.shape)
            read = weight.codec.dequantize(weight.read(), weight.shape)
            np.testing.assert_array_equal(read, numbers, err_msg=f"{name}: `read` and `view` differ")
    carried = form.carry(opened)
    assert {s for t in carried.tensors for s in t.sources} <= set(opened), "carries tensors that it has not"
    assert form.plain(opened).naming, "the checkpoint for other formats"


def _check_findings(form: Format, sample: Path) -> None:
    found = list(form.check(sample))
    _explained(form, found)
    assert not [f for f in found if f.severity is Severity.ERROR], f"errors in a sound sample: {found}"


def _explained(form: Format, found: Sequence[Finding]) -> None:
    for finding in found:
        assert finding.code in form.findings, f"{finding.code} is not explained"
        assert "\n" not in str(finding) and finding.message, finding


# ---------------------------------------------------------------- broken copies


def _check_broken(form: Format, sample: Path, seed: int) -> None:
    """Each file of the sample cut, and changed near its start, where headers are."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / sample.name
        for damage in (_cut, _changed):
            for _ in range(_ROUNDS):
                _copy(sample, copy)
                files = [p for p in sorted(copy.rglob("*")) if p.is_file()] if copy.is_dir() else [copy]
                broken = files[int(rng.integers(len(files)))]
                what = damage(broken, rng)
                _survives(form, copy, f"{broken.name} {what}")


def _copy(sample: Path, to: Path) -> None:
    if to.is_dir():
        shutil.rmtree(to)
    if sample.is_dir():
        shutil.copytree(sample, to)
    else:
        shutil.copyfile(sample, to)


def _cut(path: Path, rng: np.random.Generator) -> str:
    data = path.read_bytes()
    kept = int(rng.integers(min(len(data), 256)) if rng.random() < 0.3 else rng.integers(len(data)))
    path.write_bytes(data[:kept])
    return f"cut to {kept} of {len(data)} bytes"


def _changed(path: Path, rng: np.random.Generator) -> str:
    data = bytearray(path.read_bytes())
    places = [int(x) for x in rng.integers(0, min(len(data), 2048), 3)]
    for at in places:
        data[at] = int(rng.integers(256))
    path.write_bytes(data)
    return f"changed at {places}"


def _survives(form: Format, path: Path, what: str) -> None:
    if form.sniff(path) is None:
        return
    refusal: PolyquantError | None = None
    try:
        opened = _open(form, path)
        for weight in list(opened.values())[:4]:
            with np.errstate(all="ignore"):
                weight.dequantize()
    except PolyquantError as problem:
        refusal = problem
        assert "\n" not in str(problem), f"{what}: an error of several lines"
    found = list(form.check(path))
    _explained(form, found)
    if refusal is not None:
        assert found, f"{what}: `open` refuses it ({refusal}), `check` finds nothing"


def _check_own_files(form: Format, sample: Path) -> None:
    folder = sample if sample.is_dir() else sample.parent
    there = sorted(p.name for p in folder.iterdir()) if sample.is_dir() else []
    own = form.own_files(folder, [*there, *_FOREIGN_FILES])
    assert not own & set(_FOREIGN_FILES), f"claims what is no part of a model: {own & set(_FOREIGN_FILES)}"
    assert own <= set(there), f"claims what was not asked: {own - set(there)}"
    assert not sample.is_dir() or own, "nothing of the sample is its own, so it can never be overwritten"


# ---------------------------------------------------------------- writing


def _check_conversion(form: Format, source: Path, folder: Path, suffix: str, options: dict[str, Any]) -> None:
    first, second = folder / f"first{suffix}", folder / f"second{suffix}"
    made, again = (plan(source, form.name, **options) for _ in range(2))
    assert made.layout == again.layout and made.fingerprint == again.fingerprint, "two plans of one job differ"
    _check_layout(with_name(made, first))
    report = convert(made, first)
    convert(source, second, to=form.name, threads=1, **options)
    assert _images(first) == _images(second), "two runs, two results"
    sizes = {f.name if first.is_dir() else "": f.size for f in made.layout.files}
    assert {name: len(data) for name, data in _images(first).items()} == sizes, "sizes are not the plan's"
    assert made.nbytes == report.nbytes == sum(sizes.values())
    assert detect(first)[0].name == form.name, "what was written is recognised as something else"
    opened = open_checkpoint(first)
    assert {s.map.target: s.target.name for s in made.steps} == {n: w.codec.name for n, w in opened.items()}
    assert not [f for f in validate(first) if f.severity is Severity.ERROR], [str(f) for f in validate(first)]
    _check_errors(source, first, {s.tensor: s.error.dd if s.error else 0.0 for s in report.steps})
    refused(partial(convert, source, first, to=form.name, **options), PlanError, says="exists")
    convert(source, first, to=form.name, overwrite=True, **options)
    assert _images(first) == _images(second), "overwritten with something else"
    _check_back(first, folder / "back")


def _check_layout(made: Plan) -> None:
    """Slots of the codec's sizes, each inside its file, none over another or over the header."""
    sizes = {f.name: f.size for f in made.layout.files}
    taken: dict[str, list[tuple[int, int]]] = {
        f.name: [(at, at + len(data)) for at, data in f.pieces] for f in made.layout.files
    }
    for step in made.steps:
        for part, spec in step.target.specs(step.map.shape).items():
            slot = made.layout.slots[step.map.target, part]
            assert slot.spec.nbytes == spec.nbytes, (step.map.target, part)
            taken[slot.file].append((slot.offset, slot.offset + spec.nbytes))
    for name, places in taken.items():
        for (_, end), (begin, _) in pairwise(sorted(p for p in places if p[0] < p[1])):
            assert end <= begin, f"{name}: two things at {begin}"
        assert max((end for _, end in places), default=0) <= sizes[name], f"{name}: something lies behind its end"


def _images(path: Path) -> dict[str, bytes]:
    """File -> bytes; the name of a single file does not matter."""
    if path.is_dir():
        return {p.relative_to(path).as_posix(): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
    return {"": path.read_bytes()}


def _check_errors(source: Path, written: Path, said: dict[str, float]) -> None:
    """The sum of all squared errors is what the report says."""
    found = compare(source, written).error
    assert found.finite, "numbers that are not finite"
    total = sum(said.values())
    bound = 1e-4 * total + 1e-9 * found.aa
    assert math.isclose(found.dd, total, abs_tol=bound), f"squared error {found.dd:.6g}, the report says {total:.6g}"


def _check_back(written: Path, back: Path) -> None:
    """In a Hugging Face folder of float32 the same numbers."""
    convert(written, back, to="hf", codec="f32")
    found = compare(written, back)
    assert found.error.dd == 0 and found.tensors, f"changed on the way back: {found.error}"
    assert all(w.codec.form is Floats for w in open_checkpoint(back).values()), "the way back gives floats"
