"""Contract checks of formats. A package that adds one calls both in its own tests, with the object and a small model:

    def test_format():
        check_format(MY_FORMAT, sample, foreign=[a_gguf_file, a_folder_of_another_format])

    def test_target():
        check_target(MY_FORMAT, a_float_model, codec="my_codec")

check_format: its declarations, and a valid sample
    names      a name, a title, a priority; options are a frozen dataclass with help; findings have a code and an
               explanation
    sniff      recognises the sample by content, also under a different name; None for foreign, empty, truncated and
               missing paths, without raising
    open       sets format and naming; sizes match the codecs; every weight decodes
    check      no errors on the sample, and only findings with an explanation
    broken     truncated or changed copies: `open` raises PolyquantError or succeeds; `check` does not raise, and
               reports every copy that `open` rejects
    own_files  never a model card, only existing files
    codecs     `reads`, if the format declares its codecs, covers the sample

check_target: a conversion to the format
    options    as above; `smaller` and `claims` refer to existing options; sizes, offsets and bytes match the plan and
               are reproducible
    values     the output opens again; each tensor's error matches the report; `validate` finds no error
    target     an existing one is refused or overwritten; converting back to a Hugging Face folder gives equal values
    codecs     `writes`, if the format declares its codecs, covers the output
    arrays     polyquant.save writes arrays that open again, if the format takes arrays
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
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
from polyquant.conversion.save import save
from polyquant.conversion.steps import Plan, with_name
from polyquant.errors import PlanError, PolyquantError
from polyquant.formats.protocol import DeclaresCodecs, Format, TakesArrays
from polyquant.opening import detect, open_as, open_checkpoint
from polyquant.options import DeclaresTargetOptions, options_of
from polyquant.testing.refusals import refused
from polyquant.types import Checkpoint, Evidence, Finding, Floats, Severity

__all__ = ["check_format", "check_target"]

_CODE = re.compile(r"[A-Z]{2,6}\d{3}")
_FOREIGN_FILES = ("README.md", "LICENSE", "notes.txt", ".gitattributes", "results.csv")
_ROUNDS = 12
"""Number of broken copies of each kind."""


def check_format(form: Format, sample: Path, foreign: Sequence[Path] = (), *, seed: int = 0) -> None:
    """Run the checks above.

    Raises AssertionError. sample: a valid checkpoint of a few megabytes at most; foreign: checkpoints of other formats.
    """
    _check_names(form)
    _check_sniff(form, sample, foreign)
    _check_opening(form, sample)
    _check_findings(form, sample)
    _check_broken(form, sample, seed)
    _check_own_files(form, sample)


def check_target(form: Format, source: Path, **options: Any) -> None:
    """Run the checks above.

    Raises AssertionError. form: a registered format. source: a small float model in a Hugging Face folder; options: as
    for polyquant.convert.
    """
    target = form.target
    assert target is not None, f"{form.title} are read-only"
    assert any(f.name == form.name for f in registry.formats()), (
        f"no entry point or line in the registry for '{form.name}'"
    )
    _check_options(target.options)
    assert not target.claims({}), "claims a job without any option"
    known = {"codec", "recipe", *options_of(target.options)}
    assert set(target.smaller) <= known, f"`smaller` has unknown options: {set(target.smaller) - known}"
    assert target.naming, "the target needs a naming scheme"
    with tempfile.TemporaryDirectory() as folder:
        _check_conversion(form, source, Path(folder), target.suffix, options)
        if isinstance(form, TakesArrays):
            _check_arrays(form, Path(folder) / f"arrays{target.suffix}", options)


# ---------------------------------------------------------------- what a format says of itself


def _check_names(form: Format) -> None:
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*", form.name), f"not a valid name for --to: {form.name!r}"
    assert form.title.isprintable() and form.title.strip(), "the title is empty or not printable"
    assert isinstance(form.priority, int) and not isinstance(form.priority, bool)
    _check_options(form.open_options)
    if isinstance(form, DeclaresTargetOptions):
        options = None if form.target is None else form.target.options
        assert form.target_options is options, f"target_options are {form.target_options}, the target's are {options}"
    for code, text in form.findings.items():
        assert _CODE.fullmatch(code), f"not letters and three digits: {code!r}"
        assert len(text) > 20 and text.isprintable(), f"{code}: explain its meaning, its consequences and the remedy"
    others = [f for f in registry.formats() if f.name != form.name]
    for other in others:
        assert not set(other.findings) & set(form.findings), f"codes already used by {other.name}"


def _check_options(cls: type) -> None:
    assert is_dataclass(cls), f"{cls.__name__} is not a dataclass"
    assert cls.__dataclass_params__.frozen, f"{cls.__name__} is not frozen"  # type: ignore[attr-defined]
    for field in fields(cls):
        given = field.default is not MISSING or field.default_factory is not MISSING
        assert given, f"{cls.__name__}.{field.name} has no default"
    for name, option in options_of(cls).items():
        assert option.help.strip() and option.help.isprintable(), f"{name} has no help"
        assert option.flag == "" or option.flag.startswith("--"), option.flag


# ---------------------------------------------------------------- recognising


def _check_sniff(form: Format, sample: Path, foreign: Sequence[Path]) -> None:
    evidence = form.sniff(sample)
    assert isinstance(evidence, Evidence) and evidence.why.strip(), f"{sample} is not recognised, or without a reason"
    if any(f.name == form.name for f in registry.formats()):
        assert detect(sample)[0].name == form.name, f"{detect(sample)[0].name} claims it first: raise the priority"
    for path in foreign:
        assert form.sniff(path) is None, f"claims {path}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        empty, text, inside = folder / "empty", folder / "text.txt", folder / "folder"
        empty.touch()
        text.write_text("no weights here\n", encoding="utf-8")
        inside.mkdir()
        for path in (empty, text, inside, folder / "missing", folder / "missing" / "deeper", text / "below"):
            assert form.sniff(path) is None, f"claims {path.name}"
        if sample.is_file():
            other = folder / "other.name"
            shutil.copyfile(sample, other)
            assert form.sniff(other) is not None, "recognised by name instead of content"
            lying = folder / f"text{sample.suffix}"
            lying.write_text("no weights here\n", encoding="utf-8")
            assert form.sniff(lying) is None, "recognised by name instead of content"


# ---------------------------------------------------------------- opening


def _open(form: Format, path: Path) -> Checkpoint:
    return open_as(form, path, {})


def _check_opening(form: Format, sample: Path) -> None:
    opened = _open(form, sample)
    assert opened.format == form.name, (opened.format, form.name)
    assert opened.naming and opened.path == sample, (opened.naming, opened.path)
    assert all(path.is_file() for path in opened.files.values()), "side files must exist"
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
    if isinstance(form, DeclaresCodecs):
        assert form.files and isinstance(form.files, str)
        unread = [n for n, w in opened.items() if not isinstance(w.codec, Opaque) and not form.reads(w.codec)]
        assert not unread, f"`reads` denies codecs of the sample: {unread}"
    carried = form.carry(opened)
    assert {s for t in carried.tensors for s in t.sources} <= set(opened), "translates tensors that do not exist"
    assert form.plain(opened).naming, "plain() must set the naming scheme"


def _check_findings(form: Format, sample: Path) -> None:
    findings = list(form.check(sample))
    _explained(form, findings)
    assert not [f for f in findings if f.severity is Severity.ERROR], f"errors in a valid sample: {findings}"


def _explained(form: Format, findings: Sequence[Finding]) -> None:
    for finding in findings:
        assert finding.code in form.findings, f"{finding.code} is not explained"
        assert "\n" not in str(finding) and finding.message, finding


# ---------------------------------------------------------------- broken copies


def _check_broken(form: Format, sample: Path, seed: int) -> None:
    """Check copies of the sample, each file truncated or changed near its start, where headers are."""
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
        assert "\n" not in str(problem), f"{what}: the error has several lines"
    findings = list(form.check(path))
    _explained(form, findings)
    if refusal is not None:
        assert findings, f"{what}: `open` rejects it ({refusal}), `check` reports nothing"


def _check_own_files(form: Format, sample: Path) -> None:
    folder = sample if sample.is_dir() else sample.parent
    there = sorted(p.name for p in folder.iterdir()) if sample.is_dir() else []
    own = form.own_files(folder, [*there, *_FOREIGN_FILES])
    assert not own & set(_FOREIGN_FILES), f"claims files that are not part of a model: {own & set(_FOREIGN_FILES)}"
    assert own <= set(there), f"claims files that were not offered: {own - set(there)}"
    assert not sample.is_dir() or own, "claims no file of the sample, so it can never be overwritten"


# ---------------------------------------------------------------- writing


def _check_conversion(form: Format, source: Path, folder: Path, suffix: str, options: dict[str, Any]) -> None:
    first, second = folder / f"first{suffix}", folder / f"second{suffix}"
    first_plan, again = (plan(source, form.name, **options) for _ in range(2))
    assert first_plan.layout == again.layout and first_plan.fingerprint == again.fingerprint, (
        "two plans of the same job differ"
    )
    _check_layout(with_name(first_plan, first))
    report = convert(first_plan, first)
    convert(source, second, to=form.name, threads=1, **options)
    assert _images(first) == _images(second), "two runs give different results"
    sizes = {f.name if first.is_dir() else "": f.size for f in first_plan.layout.files}
    assert {name: len(data) for name, data in _images(first).items()} == sizes, "sizes differ from the plan"
    assert first_plan.nbytes == report.nbytes == sum(sizes.values())
    assert detect(first)[0].name == form.name, "the output is recognised as a different format"
    opened = open_checkpoint(first)
    assert {s.map.target: s.target.name for s in first_plan.steps} == {n: w.codec.name for n, w in opened.items()}
    assert not [f for f in validate(first) if f.severity is Severity.ERROR], [str(f) for f in validate(first)]
    if isinstance(form, DeclaresCodecs):
        denied = [s.map.target for s in first_plan.steps if not form.writes(s.target)]
        assert not denied, f"`writes` denies codecs of the output: {denied}"
    _check_errors(source, first, {s.tensor: s.error.dd if s.error else 0.0 for s in report.steps})
    refused(partial(convert, source, first, to=form.name, **options), PlanError, says="exists")
    convert(source, first, to=form.name, overwrite=True, **options)
    assert _images(first) == _images(second), "overwriting gives a different result"
    _check_back(first, folder / "back")


def _check_arrays(form: Format, path: Path, options: Mapping[str, Any]) -> None:
    """Check that arrays without a model round-trip with the reported error, and vectors unchanged."""
    weight = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    arrays = {"layers.0.proj.weight": weight, "layers.0.norm.weight": np.ones(256, np.float32)}
    report = save(arrays, path, to=form.name, **options)
    opened = open_checkpoint(path)
    assert opened.format == form.name and opened.keys() == arrays.keys(), list(opened)
    np.testing.assert_array_equal(opened["layers.0.norm.weight"], arrays["layers.0.norm.weight"])
    lost = np.square(opened["layers.0.proj.weight"].dequantize() - weight, dtype=np.float64).sum()
    assert math.isclose(lost, report.error.dd, rel_tol=1e-3, abs_tol=1e-9), (lost, report.error.dd)


def _check_layout(made: Plan) -> None:
    """Check that slots have the codec's sizes, stay inside their files and do not overlap."""
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
            assert end <= begin, f"{name}: overlap at {begin}"
        assert max((end for _, end in places), default=0) <= sizes[name], f"{name}: a slot extends beyond the end"


def _images(path: Path) -> dict[str, bytes]:
    """Return file name -> bytes; a single file has a fixed key."""
    if path.is_dir():
        return {p.relative_to(path).as_posix(): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
    return {"": path.read_bytes()}


def _check_errors(source: Path, written: Path, errors: dict[str, float]) -> None:
    """Check that the sum of squared errors matches the report."""
    comparison = compare(source, written).error
    assert comparison.finite, "values that are not finite"
    total = sum(errors.values())
    bound = 1e-4 * total + 1e-9 * comparison.aa
    assert math.isclose(comparison.dd, total, abs_tol=bound), (
        f"squared error {comparison.dd:.6g}, the report has {total:.6g}"
    )


def _check_back(written: Path, back: Path) -> None:
    """Check that converting back to a float32 Hugging Face folder gives the same values."""
    convert(written, back, to="hf", codec="f32")
    comparison = compare(written, back)
    assert comparison.error.dd == 0 and comparison.tensors, f"changed by converting back: {comparison.error}"
    assert all(w.codec.form is Floats for w in open_checkpoint(back).values()), "converting back must give floats"
