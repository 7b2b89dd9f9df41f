"""The user-visible surface: help, exit codes, JSON, 80 columns, pipes, clumsy arguments."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys

import pytest

from cli.bad_inputs import GGUF, SOUND
from formats.gguf_files import ARCH, file, tensor, text
from golden import VECTORS
from polyquant.cli import COMMANDS
from polyquant.cli.console import size, table

UNTIED = VECTORS / "models/tiny-llama-untied"
BITNET = VECTORS / "bitnet_gguf/hf_packed_autobitlinear"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_with_an_example(command, polyquant):
    shown = polyquant(command, "--help")
    assert shown.code == 0 and not shown.err
    assert "Example" in shown.out and f"polyquant {command}" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80


HEAVY = (
    "numpy",
    "ml_dtypes",
    "rich",
    "polyquant.types",
    "polyquant.conversion",
    "polyquant.formats.gguf.target",
    "polyquant.formats.protocol",
)


@pytest.mark.parametrize("command", ["convert", "quantize"])
def test_help_of_a_conversion_imports_options_only(command):
    """A tenth of a second; with the modules that do the work it is three times that."""
    code = (
        "import sys; from polyquant.cli import main; main([sys.argv[1], '--help']); "
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, check=True)
    assert "--tile BM,BK,bm" in done.stdout
    loaded = set(done.stderr.split())
    assert "polyquant.formats.gguf.options" in loaded
    assert not [name for name in HEAVY if name in loaded]


def test_help_and_version(polyquant):
    overview = polyquant("--help").out
    assert all(command in overview for command in COMMANDS)
    assert polyquant("--version").out.startswith("polyquant 0.")
    assert "Usage" in polyquant().out + polyquant().err


TYPOS = {
    ("inspekt",): "did you mean 'inspect'?",
    ("zzzz",): "no command 'zzzz'",
    ("perplexity", GGUF): "did you mean 'eval'?",
    ("run", GGUF, "--temp", "0"): "'--temperature'",
    ("quantize", SOUND, "OUT", "Q4_K_M"): "Did you mean --recipe q4_k_m?",
    ("inspect", GGUF, "--formt", "json"): "--format",
    ("inspect", GGUF, "--format", "xml"): "'xml' is not one of",
    ("inspect",): "Missing argument",
    ("inspect", GGUF, GGUF): "unexpected extra argument",
    ("convert", SOUND, "OUT", "--codec", "q4k"): "did you mean",
    ("convert", SOUND, "OUT", "--recipe", "q4_km"): "did you mean",
    ("convert", SOUND, "OUT", "--recipe", "nothing.toml"): "nothing.toml",
    ("convert", SOUND, "OUT", "--rule", "noequals"): "noequals",
    ("convert", SOUND, "OUT", "--rule", "*=q9"): "q9",
    ("convert", SOUND, "OUT", "--to", "onnx"): "'onnx' is not one of",
    ("convert", SOUND, "OUT", "--shard-size", "big"): "2GB",
    ("convert", SOUND, "OUT", "--to", "vllm"): "Did you mean --to compressed-tensors?",
    ("convert", SOUND, "OUT", "--to", "bf16"): "Did you mean --codec bf16?",
    ("convert", SOUND, "OUT", "--to", "q4_k_m"): "Did you mean --recipe q4_k_m?",
    ("convert", SOUND, "OUT", "--to", "gguff"): "Did you mean 'gguf'?",
    ("convert", SOUND, "OUT", "--threads", "0"): "0",
    ("convert", SOUND, "OUT", "--tile", "1,2"): "128,64,32",
    ("convert", SOUND, "OUT", "--resume", "required"): "nothing to resume",
    ("convert", SOUND, "OUT", "--importance", "nothing.gguf"): "nothing.gguf",
    ("convert", SOUND, "OUT", "--architecture", "a\x1b[31mb"): "",
    ("explain", "GGUF999"): "did you mean",
    ("explain", ""): "finding",
    ("edit", GGUF): "nothing to do",
    ("edit", GGUF, "--set", "novalue"): "novalue",
    ("edit", GGUF, "--rename", "a"): "OLD=NEW",
    ("edit", GGUF, "--remove", "no.such.key"): "no.such.key",
    ("compare", GGUF, "nothing.gguf"): "nothing.gguf",
    ("report", GGUF, "nothing.gguf", "-o", "OUT"): "nothing.gguf",
    ("certify", GGUF, "nothing.gguf"): "nothing.gguf",
    ("validate", GGUF, "--against", "nothing.gguf"): "nothing.gguf",
    ("inspect", SOUND, "--ternary-layout", "i2_s.arm"): "GGUF",
    ("eval", GGUF, "--text", "nothing.txt"): "nothing.txt",
}


@pytest.mark.parametrize("args", TYPOS, ids=lambda args: " ".join(str(a).rpartition("/")[2] for a in args))
def test_a_typo_is_answered_with_a_suggestion(args, polyquant, tmp_path):
    outcome = polyquant(*(tmp_path / "out.gguf" if a == "OUT" else a for a in args))
    assert outcome.code == 2 and "Traceback" not in outcome.err
    assert not outcome.out or "--resume" in args  # the plan is printed first
    assert TYPOS[args] in outcome.err and "\x1b" not in outcome.err
    assert not list(tmp_path.iterdir())


TABLES = [
    ("inspect", GGUF),
    ("inspect", SOUND, "--tensors", "*"),
    ("inspect", BITNET),
    ("certify", UNTIED / "hf", UNTIED / "tiny-llama-untied-Q4_K_M.gguf"),
    ("compare", BITNET, VECTORS / "bitnet_gguf/tiny-bitnet-b158-i2_s-x86_128.gguf"),
    ("compare", UNTIED / "hf", UNTIED / "tiny-llama-untied-Q4_K_M.gguf", "--sort", "error"),
    ("validate", GGUF),
    ("convert", BITNET, "OUT", "--codec", "i2_s.x86", "--dry-run"),
    ("convert", BITNET, "OUT", "--codec", "tq2_0"),
    ("quantize", UNTIED / "hf", "OUT"),
    ("doctor",),
]


@pytest.mark.parametrize("args", TABLES, ids=lambda args: f"{args[0]} {str(args[1:2])[-30:]}")
def test_tables_fit_80_columns(args, polyquant, tmp_path):
    outcome = polyquant(*(tmp_path / "out.gguf" if a == "OUT" else a for a in args))
    assert outcome.code == 0 or args == ("doctor",)  # which warns where only numpy runs
    assert not outcome.err
    for line in outcome.out.splitlines():
        assert line.isprintable(), ascii(line)
        told = (
            "file ",
            "wrote ",
            "sound: ",
            "certified: ",
            "warning: ",
            "note: ",
        )  # paths and sentences keep their length
        assert len(line) <= 80 or line.startswith(told), line


def test_numbers_stay_visible_next_to_long_names(polyquant):
    t = table("tensor", "from", "to", "action", ">size")
    t.add_row("z" * 300, "hf_bitnet.autobitlinear", "trinity.i2_s", "transcode", "1234.5 GiB")
    head, row, *more = t.lines(80)
    assert len(row) == 80 and row.endswith("1234.5 GiB") and head.endswith("size")
    assert "".join([row, *more]).count("z") == 300 and max(map(len, more)) <= 80


def test_a_pipe_gets_each_row_on_one_line():
    """As users run it: the environment sets no width."""
    env = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    command = [sys.executable, "-m", "polyquant", "convert", UNTIED / "hf", "out.gguf", "--recipe", "q2_k", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    rows = done.stdout.splitlines()
    assert any(line.startswith("blk.0.ffn_down.weight ") and len(line) > 80 for line in rows)
    assert "…" not in done.stdout and "q2_k: *ffn_down*" in done.stdout


@pytest.mark.parametrize(
    "args",
    [("inspect", GGUF), ("compare", GGUF, GGUF), ("validate", GGUF), ("convert", SOUND, "OUT", "--dry-run"),
        ("convert", SOUND, "OUT")],
    ids=lambda args: args[0],
)  # fmt: skip
def test_json_output_is_valid(args, polyquant, tmp_path):
    outcome = polyquant(*(tmp_path / "out.gguf" if a == "OUT" else a for a in args), "--format", "json")
    assert outcome.code == 0 and not outcome.err

    def refuse(word):
        raise AssertionError(word)

    json.loads(outcome.out, parse_constant=refuse)


NASTY = "[/] \x1b[2J\r\n[red]x\u202e"


def test_names_from_files_are_escaped(polyquant, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(
        file([ARCH, text(f"k{NASTY}", f"v{NASTY}")], [tensor(f"t{NASTY}", (4, 2), 0, 0)], struct.pack("<8f", *range(8)))
    )
    calls = [("inspect", path), ("inspect", path, "--tensors", "*"), ("compare", path, path), ("validate", path),
             ("convert", path, tmp_path / "y.gguf"), ("convert", path, tmp_path / "hf", "--to", "hf")]  # fmt: skip
    for call in calls:
        outcome = polyquant(*call)
        assert "Traceback" not in outcome.err, outcome.err
        assert all(line.isprintable() for line in (outcome.out + outcome.err).splitlines()), ascii(outcome)
    assert "[red]x" in polyquant("inspect", path).out


def test_a_path_is_not_markup(polyquant, tmp_path):
    folder = tmp_path / "[" / "]"
    folder.mkdir(parents=True)
    shutil.copy(GGUF, folder / "x[red].gguf")
    for verb in ("inspect", "validate"):
        outcome = polyquant(verb, folder / "x[red].gguf")
        assert outcome.code == 0 and "/[/]/x[red].gguf" in outcome.out


def test_a_closed_pipe_ends_the_program_quietly():
    script = "from polyquant.cli import main; main()"
    command = [sys.executable, "-c", script, "inspect", str(UNTIED / "hf"), "--format", "json"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait() == 1


def test_sizes_are_in_powers_of_1024():
    assert [size(n) for n in (0, 1023, 1024, 1 << 30, 5 << 40)] == ["0 B", "1023 B", "1.0 KiB", "1.0 GiB", "5.00 TiB"]


def test_python_m_polyquant_works():
    done = subprocess.run(
        [sys.executable, "-m", "polyquant", "explain", "MOD001"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("MOD001"), done
