"""Closed standard streams, file names that are not UTF-8, recipes and links of every kind: done, or one clear line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import polyquant as pq
from cli.bad_inputs import GGUF, SOUND
from polyquant.errors import PolyquantError

ODD = os.fsdecode(b"b\xff\xfe")
"""A file name that is not UTF-8, as Python represents it."""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(pq.__file__).resolve().parents[1])}


def shell(redirected, *arguments, cwd):
    """Run the command in a shell with redirections, as `polyquant ... >&-`."""
    line = f'exec "$@" {redirected}'
    command = ["bash", "-c", line, "-", sys.executable, "-m", "polyquant", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, timeout=60, cwd=cwd, env=ENVIRONMENT, check=False)
    assert b"Traceback" not in done.stderr, done.stderr
    return done


COMMANDS = (
    ("--help",),
    ("inspect", GGUF),
    ("validate", GGUF, "--format", "json"),
    ("run", GGUF, "-p", "x", "-n", "1"),
    ("codecs",),
    ("doctor",),
)
CLOSED = (">&-", "2>&-", "<&-", "<&- >&- 2>&-")


@pytest.mark.parametrize(
    ("closed", "arguments"),
    [
        pytest.param(c, a, id=f"{a[0]}-{c}", marks=[] if c == CLOSED[-1] or a[0] == "run" else [pytest.mark.slow])
        for a in COMMANDS
        for c in CLOSED
    ],
)
def test_closed_streams_are_like_dev_null(closed, arguments, tmp_path):
    done = shell(closed, *arguments, cwd=tmp_path)
    assert done.returncode == 0
    assert bool(done.stdout) == (">&-" not in closed.replace("2>&-", ""))


def test_with_closed_streams_the_output_contains_only_the_model(tmp_path):
    for name, closed in (("a.gguf", ""), ("b.gguf", "<&- >&- 2>&-")):
        assert shell(closed, "convert", SOUND, name, cwd=tmp_path).returncode == 0
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_without_stdin_there_is_no_prompt(tmp_path):
    done = shell("<&-", "run", GGUF, cwd=tmp_path)
    assert done.returncode == 2 and b"the prompt is empty" in done.stderr


def test_errors_keep_their_code_without_stderr(tmp_path):
    assert shell("2>&-", "inspect", "nothing", cwd=tmp_path).returncode == 2


def test_a_full_disk_is_one_line(tmp_path):
    done = shell(">/dev/full", "codecs", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.count(b"\n") == 1 and b"No space left" in done.stderr


def test_characters_that_stdout_cannot_encode_are_escaped(tmp_path):
    env = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "polyquant", "run", GGUF, "-p", "x", "-n", "40"]
    done = subprocess.run(command, capture_output=True, env=env, timeout=60, check=False)
    assert done.returncode == 0 and b"\\u" in done.stdout and done.stdout.isascii()


# ---------------------------------------------------------------- names that are not UTF-8


@pytest.fixture
def odd(tmp_path):
    """A folder and a file with such names, in a folder with such a name."""
    place = tmp_path / ODD
    place.mkdir()
    (place / f"{ODD}.gguf").write_bytes(GGUF.read_bytes())
    (place / "text.txt").write_text("hello world, this is a text. " * 10)
    (place / ODD).symlink_to(SOUND)
    return place


VERBS = {
    "inspect": ("inspect", "FILE"),
    "inspect json": ("inspect", "FOLDER", "--format", "json"),
    "validate": ("validate", "FILE", "--against", "FOLDER"),
    "validate json": ("validate", "FOLDER", "--format", "json"),
    "compare": ("compare", "FILE", "FOLDER", "--format", "json"),
    "convert": ("convert", "FOLDER", "OUT.gguf"),
    "convert folder": ("convert", "FILE", "OUT", "--to", "hf"),
    "quantize": ("quantize", "FOLDER", "OUT", "--codec", "w8a16", "--to", "msmodelslim"),
    "dry run": ("quantize", "FOLDER", "OUT.gguf", "--codec", "q8_0", "--dry-run", "--format", "json"),
    "edit": ("edit", "FILE", "--output", "OUT.gguf", "--set", "general.name=x"),
    "importance": ("importance", "FOLDER", "OUT.gguf", "--calibration", "TEXT", "--windows", "1"),
    "run": ("run", "FILE", "-f", "TEXT", "-n", "1", "--format", "json"),
    "eval": ("eval", "FILE", "--text", "TEXT", "--context", "16", "--tokens", "64", "--format", "json"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_file_names_need_not_be_utf8(verb, odd, polyquant):
    places = {"FILE": odd / f"{ODD}.gguf", "FOLDER": odd / ODD, "TEXT": odd / "text.txt"}
    places |= {"OUT": odd / f"out{ODD}", "OUT.gguf": odd / f"out{ODD}.gguf"}
    outcome = polyquant(*(places.get(a, a) for a in VERBS[verb]))
    assert outcome.code == 0, outcome
    if any(a.startswith("OUT") for a in VERBS[verb]) and verb != "dry run":
        assert any(p.name.startswith("out") for p in odd.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", f"no{ODD}"),
        ("validate", f"no{ODD}", "--format", "json"),
        ("convert", f"no{ODD}", f"to{ODD}.gguf"),
        ("run", GGUF, "-p", ODD),
        ("run", GGUF, "-f", ODD),
        ("edit", GGUF, "--output", "out.gguf", "--set", f"general.name={ODD}"),
        ("edit", GGUF, "--output", "out.gguf", "--rename-tensor", f"output_norm.weight={ODD}"),
        ("quantize", SOUND, "out.gguf", "--recipe", f"{ODD}.toml"),
        ("explain", ODD),
    ],
    ids=lambda a: " ".join(map(str, a))[:12],
)
def test_names_and_prompts_that_are_not_utf8_are_refused_in_one_line(arguments, polyquant, tmp_path):
    placed = [str(tmp_path / a) if str(a).startswith(("no", "to", "out")) else a for a in arguments]
    outcome = polyquant(*placed)
    assert outcome.code in (1, 2) and "polyquant: " in outcome.line
    assert not list(tmp_path.iterdir())


def test_a_model_named_after_its_folder_gets_a_valid_name(odd):
    plan = pq.plan(odd / ODD, "gguf")
    assert plan.source.path.name == ODD
    pq.convert(odd / ODD, odd / "named.gguf")
    assert pq.open(odd / "named.gguf").metadata["general.name"] == "B\ufffd\ufffd"


# ---------------------------------------------------------------- recipes


RECIPES = {
    "nested arrays": ("rules = " + "[" * 5000 + "]" * 5000, "nested too deep"),
    "nested tables": ("rules = " + "{a=" * 5000 + "1" + "}" * 5000, "nested too deep"),
    "nested keys": (".".join(["a"] * 300_000) + " = 1", "too many dotted keys"),
    "nested headers": ("[" + ".".join(["a"] * 300_000) + "]", "too many dotted keys"),
    "integer": ("file_type = " + "9" * 100_000, "not a readable recipe"),
    "hexadecimal": ("file_type = 0x" + "9" * 100_000, "file_type is out of range"),
    "file_type negative": ("file_type = -1", "file_type is out of range"),
    "file_type text": ('file_type = "x"', "'file_type' has the wrong type"),
    "base": ("base = 3", "'base' has the wrong type (expected string, found integer)"),
    "rules": ("rules = 3", "'rules' has the wrong type"),
    "rule": ("rules = [3]", "rule 1 has the wrong type"),
    "rule without codec": ('rules = [{match = "a"}]', "rule 1 needs match and codec"),
    "match": ('rules = [{match = 1, codec = "q8_0"}]', "rule 1: 'match' has the wrong type"),
    "codec": ('rules = [{match = "a", codec = 2}]', "rule 1: 'codec' has the wrong type"),
    "gqa": ('rules = [{match = "a", codec = "q8_0", gqa = "x"}]', "rule 1: 'gqa' has the wrong type"),
    "unknown key": ("a = 1", "unknown key 'a'"),
    "extends": ("extends = 1", "'extends' has the wrong type"),
    "extends itself": ('extends = "FILE"', "too many recipes extend each other"),
    "long name": (f'base = "{"x" * 100_000}"', "no codec is named"),
    "not UTF-8": ("\udcff", "not UTF-8 (byte 0)"),
    "large": ("#" * 5_000_000, "too large (expected at most 1048576 bytes"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_bad_recipe_is_one_line(name, polyquant, tmp_path):
    text, message = RECIPES[name]
    file = tmp_path / "x.toml"
    file.write_bytes(os.fsencode(text.replace("FILE", str(file))))
    outcome = polyquant("quantize", SOUND, tmp_path / "x.gguf", "--recipe", file)
    assert outcome.code == 2 and message in outcome.line and len(outcome.line) < 900
    assert outcome.cpu < 2 and outcome.rss < 100e6, outcome


def test_a_recipe_is_a_regular_file(polyquant, tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "device.toml").symlink_to("/dev/zero")
    (tmp_path / "dangling.toml").symlink_to("nothing")
    for name in ("pipe", "folder", "device", "dangling", "missing"):
        outcome = polyquant("quantize", SOUND, tmp_path / "x.gguf", "--recipe", tmp_path / f"{name}.toml")
        assert outcome.code == 2 and f"{name}.toml: " in outcome.line and outcome.cpu < 2


# ---------------------------------------------------------------- links


@pytest.mark.parametrize("name", ["README.md", "notes.txt", "pytorch_model.bin", "extra.safetensors", "a.index.json"])
def test_an_unused_dangling_link_is_ignored(name, polyquant, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in SOUND.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / name).symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    for target in ("x.gguf", "out"):
        outcome = polyquant("convert", folder, tmp_path / target)
        assert outcome.code == 0, outcome
    assert polyquant("run", folder, "-p", "x", "-n", "1").code == 0


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_dangling_link_that_is_needed_is_one_line(name, polyquant, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in SOUND.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / name).unlink()
    (folder / name).symlink_to("nowhere")
    outcome = polyquant("convert", folder, tmp_path / "x.gguf")
    assert outcome.code == 2 and f"{name}: is a broken link" in outcome.line


def test_library_calls_raise_polyquant_errors(tmp_path):
    with pytest.raises(PolyquantError, match="not valid Unicode"):
        pq.load(GGUF).tokenizer.encode(ODD)
