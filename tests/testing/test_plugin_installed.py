"""examples/plugin as users install it: built and installed by pip, then the command line in forks (cli/child.py)."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import polyquant
from cli.child import Server

PACKAGE = Path(__file__).resolve().parents[2] / "examples" / "plugin"
HOME = Path(polyquant.__file__).resolve().parent
LLAMA = HOME / "demo" / "llama"


def child(arguments, *places, cwd):
    """Run a Python process with polyquant and the packages in `places`."""
    path = os.pathsep.join(str(p) for p in (*places, HOME.parent))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=env,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that pip installed the package into. Building writes next to the source, so a copy is built."""
    folder = tmp_path_factory.mktemp("plugin")
    source, site = folder / "source", folder / "site"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    done = subprocess.run(
        [sys.executable, *pip, "--no-build-isolation", "--target", str(site), str(source)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"setuptools of the `test` extra builds it: {done.stderr}"
    return site


@pytest.fixture(scope="module")
def run(installed, tmp_path_factory):
    """Calls the command line with the package installed, in a folder that holds x.pqx."""
    folder = tmp_path_factory.mktemp("work")
    server = Server(folder, PYTHONPATH=os.pathsep.join([str(installed), str(HOME.parent)]))

    def call(*arguments, code=0):
        done = server.run(*arguments, columns=200)
        assert done.code == code, done.out + done.err
        assert "Traceback" not in done.err
        return done.out + done.err

    call("convert", LLAMA, "x.pqx", "--to", "example", "--codec", "example.q6", "--alignment", "64")
    yield call
    server.close()


def test_a_process_of_its_own(installed, tmp_path):
    said = child(["-m", "polyquant", "convert", LLAMA, "x.pqx", "--to", "example"], installed, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    said = child(["-m", "polyquant", "inspect", "x.pqx"], installed, cwd=tmp_path)
    assert "example (starts with PQX1)" in said.stdout and not said.stderr


def test_inspect(run):
    said = run("inspect", "x.pqx")
    assert "example (starts with PQX1)" in said and "example.q6 99.9%" in said


def test_validate_and_explain(run):
    assert "sound" in run("validate", "x.pqx")
    assert "sound" in run("validate", "x.pqx", "--against", LLAMA)
    assert "Copy it again." in run("explain", "pqx001")
    assert "did you mean PQX00" in run("explain", "PQX009", code=2)


def test_run(run):
    assert run("run", "x.pqx", "-p", "The king", "-n", "4").strip()


def test_other_formats(run):
    assert "GGUF has no type for example.q6" in run("convert", "x.pqx", "back.gguf", code=2)
    assert "wrote back.gguf" in run("convert", "x.pqx", "back.gguf", "--codec", "f16")
    assert "wrote again.pqx" in run("convert", "back.gguf", "again.pqx", "--codec", "example.q6")
    assert "wrote hf" in run("convert", "x.pqx", "hf", "--to", "hf")


def test_quantize_uses_the_formats_default(run):
    assert "example.q6" in run("quantize", LLAMA, "small.pqx", "--to", "example")


def test_overwrite(run):
    run("convert", LLAMA, "twice.pqx", "--to", "example")
    assert "target exists" in run("convert", LLAMA, "twice.pqx", "--to", "example", code=2)
    run("convert", LLAMA, "twice.pqx", "--to", "example", "--overwrite")


def test_help_groups_its_options_under_its_title(run):
    said = run("convert", "--help")
    assert "example folders:\n  --alignment" in said and "|example|" in said.replace("[", "|").replace("]", "|")


def test_misspelt_names_suggest_it(run):
    assert "Did you mean 'example'?" in run("convert", LLAMA, "y", "--to", "exampel", code=2)
    assert "did you mean example.q6?" in run("convert", LLAMA, "y", "--codec", "example.q7", code=2)


def test_unknown_files_list_it_too(run):
    assert "installed package: example folders" in run("inspect", __file__, code=2)
    assert "installed package: example folders" in run("inspect", Path(__file__).parent, code=2)


def test_its_options_are_refused_for_other_targets(run):
    assert "--alignment is for example folders" in run("convert", LLAMA, "n.gguf", "--alignment", "64", code=2)


def test_from_python(installed, tmp_path):
    text = "import polyquant as pq; print(pq.codec('example.q6').bpw); pq.plan('x', 'exampel')"
    done = child(["-c", text], installed, cwd=tmp_path)
    assert done.stdout.strip() == "6.5"
    assert "no format is named 'exampel'; did you mean example?" in done.stderr


def test_lists_and_saved_arrays(run, installed, tmp_path):
    assert re.search(r"^example.q6 +6.5 +\w+ +example\b", run("codecs"), re.M)
    assert "example reads and writes: " in run("formats")
    text = """
import numpy as np, polyquant as pq
pq.save({"a.weight": np.ones((4, 64), np.float32)}, "out", to="example", codec="example.q6", alignment=64)
print(pq.open("out"), pq.codecs()["example.q6"].about)
"""
    done = child(["-c", text], installed, cwd=tmp_path)
    assert done.stdout.startswith("<Checkpoint example out: 1 tensors, 6.5"), done.stderr
    assert "of the package polyquant-example" in done.stdout


def test_its_own_tests_pass(installed, tmp_path):
    done = child(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, "-c", os.devnull, PACKAGE / "tests"],
        installed, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.fixture
def broken(tmp_path):
    """A package whose module imports a missing one, and one whose format has a built-in name."""
    site = tmp_path / "site"
    info = site / "broken_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n", encoding="utf-8")
    groups = {
        "polyquant.formats": ("lost = broken_plugin:LOST", "gguf = math:pi", "odd = math:pi"),
        "polyquant.codecs": ("lost.codec = broken_plugin:CODEC",),
        "polyquant.architectures": ("lost = broken_plugin:RECORD",),
    }
    lines = [line for group, points in groups.items() for line in (f"[{group}]", *points)]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    (site / "broken_plugin.py").write_text("raise ImportError('no module\\nof that name')\n", encoding="utf-8")
    return site


def test_a_broken_package_is_a_warning(broken, tmp_path):
    done = child(["-m", "polyquant", "inspect", LLAMA], broken, cwd=tmp_path)
    assert done.returncode == 0 and "3,672,320 in 38 tensors" in done.stdout
    assert done.stderr.splitlines() == [
        "polyquant: the plugin 'lost' cannot be loaded: ImportError: no module\\nof that name; "
        "reinstall or remove the package 'broken-plugin'",
        "polyquant: the plugin 'gguf' is skipped: a format of this name already exists",
        "polyquant: the plugin 'odd' is skipped: a format of this name has the attribute name '3.141592653589793'",
    ]


def test_a_broken_codec_is_an_error_on_use(broken, tmp_path):
    done = child(["-m", "polyquant", "convert", LLAMA, "y", "--codec", "lost.codec"], broken, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "the plugin 'lost.codec' cannot be loaded: ImportError" in done.stderr
    assert not (tmp_path / "y").exists()


FAILING = """
from polyquant.errors import InputError
from polyquant.formats.folder_format import FolderFormat
from polyquant.options import NoOptions


class Failing(FolderFormat):
    title, priority, open_options = "failing files", 99, NoOptions
    target = None
    target_options = None

    def __init__(self, name, problem):
        self.name, self.problem = name, problem

    def sniff(self, path):
        if isinstance(self.problem, Exception):
            raise self.problem
        return self.problem

    def open(self, path, options):
        raise NotImplementedError


BUG = Failing("bug", ZeroDivisionError("by\\nzero"))
STRICT = Failing("strict", InputError("holds a link that leaves it"))
YES = Failing("yes", True)
SHORT = Failing("short", None)
SHORT.priority = "high"
"""


@pytest.fixture
def failing(tmp_path):
    """A package with formats that raise while sniffing, a format without a member, and an invalid architecture."""
    site = tmp_path / "site"
    info = site / "failing_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: failing-plugin\nVersion: 1.0\n", encoding="utf-8")
    points = [f"{name} = failing_plugin:{name.upper()}" for name in ("bug", "strict", "yes", "short")]
    lines = [
        "[polyquant.formats]",
        *points,
        "[polyquant.architectures]",
        "odd = math:pi",
        "stops = stopping_plugin:RECORD",
    ]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    (site / "failing_plugin.py").write_text(FAILING, encoding="utf-8")
    (site / "stopping_plugin.py").write_text("import sys\nsys.exit(3)\n", encoding="utf-8")
    return site


def test_a_format_with_a_failing_sniff_is_skipped(failing, tmp_path):
    done = child(["-m", "polyquant", "inspect", LLAMA], failing, cwd=tmp_path)
    assert done.returncode == 0 and "3,672,320 in 38 tensors" in done.stdout
    assert done.stderr.splitlines() == [
        "polyquant: the plugin 'short' is skipped: its format has no valid priority",
        "polyquant: the plugin 'bug' failed to inspect it: ZeroDivisionError: by\\nzero; it was skipped",
        "polyquant: the plugin 'strict' failed to inspect it: holds a link that leaves it; it was skipped",
        "polyquant: the plugin 'yes' failed to inspect it: "
        "TypeError: sniff must return Evidence or None, not bool; it was skipped",
    ]


def test_errors_for_unknown_paths_name_failed_formats(failing, tmp_path):
    for path in (Path(__file__), Path(__file__).parent):
        done = child(["-m", "polyquant", "inspect", path], failing, cwd=tmp_path)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        last = done.stderr.splitlines()[-1]
        assert (
            "the plugin 'bug' failed to inspect it: ZeroDivisionError: by\\nzero; the plugin 'strict' failed to" in last
        )


def test_a_format_with_a_failing_sniff_does_not_break_help(failing, tmp_path):
    done = child(["-m", "polyquant", "convert", "--help"], failing, cwd=tmp_path)
    assert done.returncode == 0 and "--tile" in done.stdout


def test_an_invalid_architecture_is_a_warning(failing, tmp_path):
    code = "from polyquant.architectures.find import by_name, known; print(by_name('x'), 'llama' in known())"
    done = child(["-c", code], failing, cwd=tmp_path)
    assert done.stdout.split() == ["None", "True"]
    assert "the plugin 'stops' cannot be loaded: SystemExit: 3" in done.stderr
    assert (
        "an installed architecture is ignored: 3.141592653589793 is not an architectures.record.Architecture"
        in done.stderr
    )


RAISING = """
from polyquant.formats.folder_format import FolderFormat
from polyquant.options import NoOptions
from polyquant.types import Evidence


class Raising(FolderFormat):
    name, title, priority, open_options, target = "raising", "raising files", 99, NoOptions, None
    target_options = None

    def sniff(self, path):
        return Evidence("raising", "its name") if path.name == "x.raising" else None

    def open(self, path, options):
        return {}["by\\nopen"]

    files = "*.raising"

    def reads(self, codec):
        raise ZeroDivisionError("reads")

    writes = reads


class Described(Raising):
    name = "described"

    @property
    def target_options(self):
        raise ZeroDivisionError("options")


class Codec:
    name, form, granule, row_sliced = "raising", object, (1, 1), True

    def specs(self, shape):
        raise ZeroDivisionError("specs")

    quantize = pack = unpack = dequantize = specs


def family(name):
    raise ZeroDivisionError("family")


RAISING, DESCRIBED, CODEC = Raising(), Described(), Codec()
"""


@pytest.fixture
def raising(tmp_path):
    """A package whose format and codecs raise when they are described, constructed or used."""
    site = tmp_path / "site"
    info = site / "raising_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: raising-plugin\nVersion: 1.0\n", encoding="utf-8")
    formats = ("[polyquant.formats]", "raising = raising_plugin:RAISING", "described = raising_plugin:DESCRIBED")
    codecs = ("[polyquant.codecs]", "raising = raising_plugin:CODEC", "made.* = raising_plugin:family")
    (info / "entry_points.txt").write_text("\n".join((*formats, *codecs)), encoding="utf-8")
    (site / "raising_plugin.py").write_text(RAISING, encoding="utf-8")
    (tmp_path / "x.raising").write_bytes(b"x")
    return site


BLAMED = "polyquant: the plugin 'raising', 'made.*', 'described' of the package 'raising-plugin' failed ("


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (("inspect", "x.raising"), "KeyError: "),
        (("validate", "x.raising"), "AttributeError: "),
        (("convert", "x.raising", "out.gguf"), "KeyError: "),
        (("convert", LLAMA, "out.gguf", "--codec", "raising"), "ZeroDivisionError: specs"),
        (("convert", LLAMA, "out.gguf", "--codec", "made.3"), "ZeroDivisionError: family"),
    ],
)
def test_a_plugin_that_raises_is_one_line_with_its_package(raising, tmp_path, arguments, problem):
    done = child(["-m", "polyquant", *arguments], raising, cwd=tmp_path)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.splitlines()[-1]
    assert problem in last and last.startswith(BLAMED), last
    assert not (tmp_path / "out.gguf").exists()


def test_other_commands_keep_working_with_a_plugin_that_raises(raising, tmp_path):
    skipped = "polyquant: the plugin 'described' is skipped: its options cannot be read: ZeroDivisionError: options"
    for arguments in (
        ("inspect", LLAMA),
        ("codecs",),
        ("formats",),
        ("convert", "--help"),
        ("convert", LLAMA, "o.gguf"),
    ):
        done = child(["-m", "polyquant", *arguments], raising, cwd=tmp_path)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        assert skipped in done.stderr.splitlines()
    assert (tmp_path / "o.gguf").exists()
