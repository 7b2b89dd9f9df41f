"""Bad input on the command line: one clear line and exit 2, or findings; no traceback, within seconds and 300 MB."""

from __future__ import annotations

import json

import pytest

import polyquant as pq
from cli.bad_inputs import COSTLY, INCOMPLETE, ODD, SETTINGS, UNLIKELY, UNTRANSLATABLE, UNUSABLE, model
from polyquant.errors import PolyquantError

EXITS = {"inspect": {2}, "validate": {1, 2}, "convert": {2}}


def cheap(outcome, name):
    """Checks processor time, because other programs run too. The limit is 300 MB; huge pages add some variation."""
    assert outcome.cpu < (10 if name in COSTLY else 5), (name, outcome.cpu)
    assert outcome.rss < 250e6, (name, outcome.rss)


def verbs(polyquant, path, folder, name):
    yield "validate", polyquant("validate", path)
    if name in COSTLY:  # checking opens too
        return
    yield "inspect", polyquant("inspect", path)
    yield "convert", polyquant("convert", path, folder / "out.gguf")


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_input_is_a_one_line_error(name, polyquant, tmp_path):
    (tmp_path / "in").mkdir()
    path = UNUSABLE[name](tmp_path / "in")
    for verb, outcome in verbs(polyquant, path, tmp_path, name):
        assert outcome.code in EXITS[verb], (verb, outcome)
        if outcome.code == 2:
            assert outcome.line.startswith("polyquant: ") and len(outcome.line) < 900 and not outcome.out
        else:
            assert "polyquant explain " in outcome.out and not outcome.err
        cheap(outcome, name)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("name", UNTRANSLATABLE)
def test_a_folder_with_invalid_content_does_not_convert(name, polyquant, tmp_path):
    (tmp_path / "in").mkdir()
    path = UNTRANSLATABLE[name](tmp_path / "in")
    outcome = polyquant("convert", path, tmp_path / "out.gguf")
    assert outcome.code == 2 and outcome.line
    cheap(outcome, name)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    assert polyquant("inspect", path).code == 0


@pytest.mark.parametrize("name", INCOMPLETE)
def test_missing_parts_are_reported(name, polyquant, tmp_path):
    (tmp_path / "in").mkdir()
    outcome = polyquant("convert", INCOMPLETE[name](tmp_path / "in"), tmp_path / "out.gguf", "--allow-unknown")
    assert outcome.code == 0 and "\nwarning: " in outcome.out
    dry = ("--dry-run", "--allow-unknown")
    assert "warning: " in polyquant("convert", tmp_path / "in/model", tmp_path / "out2.gguf", *dry).out


def test_missing_tensors_are_refused_before_any_work(polyquant, tmp_path):
    (tmp_path / "in").mkdir()
    source = INCOMPLETE["more layers than tensors"](tmp_path / "in")
    outcome = polyquant("convert", source, tmp_path / "out.gguf")
    assert outcome.code == 2 and "more layers than tensors" in outcome.line
    assert "--allow-unknown" in outcome.line and not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("name", UNLIKELY)
def test_hostile_input_costs_little(name, polyquant, tmp_path):
    (tmp_path / "in").mkdir()
    path = UNLIKELY[name](tmp_path / "in")
    for _, outcome in verbs(polyquant, path, tmp_path, name):
        assert outcome.code in (0, 1, 2), outcome
        assert outcome.code != 2 or outcome.line
        cheap(outcome, name)


SOME = [(*setting, ODD[n % 3 :: 3]) for n, setting in enumerate(SETTINGS)]
ALL = [pytest.param(*setting, ODD, marks=pytest.mark.slow) for setting in SETTINGS]


@pytest.mark.parametrize("file, key, values", [*SOME, *ALL])
def test_any_config_value_gives_a_plan_or_one_error(file, key, values, tmp_path):
    folder = model(file, lambda body: body)(tmp_path)
    body = json.loads((folder / file).read_text())
    for value in values:
        (folder / file).write_text(json.dumps({**body, key: value}))
        for verb in (
            lambda: pq.inspect(folder).to_json(),
            lambda: pq.validate(folder),
            lambda: pq.plan(folder, "gguf"),
            lambda: pq.plan(folder, "hf", codec="f32"),
        ):
            try:
                verb()
            except PolyquantError as e:
                assert "\n" not in str(e)


@pytest.mark.parametrize("name", ["a\0b", "\udcff", "x" * 5000])
def test_invalid_file_names(name):
    with pytest.raises(PolyquantError):
        pq.open(name)
