"""Completion of shells: by click's own interface, and in a real bash."""

from __future__ import annotations

import os
import pty
import resource
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

import polyquant as polyquant_package
from docs.console import CLIENT
from polyquant.cli import cli
from polyquant.cli.completing import VARIABLE


def completions(*words: str) -> list[str]:
    found = ShellComplete(cli, {}, "polyquant", VARIABLE).get_completions(list(words[:-1]), words[-1])
    return [item.value if item.type == "plain" else f"({item.type})" for item in found]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("qua",), ["quantize"]),
        (("quantize", "--recipe", "q4_k"), ["q4_k_s", "q4_k_m"]),
        (("quantize", "--recipe", "own/"), ["(file)"]),
        (("quantize", "--codec", "q4_"), ["q4_0", "q4_1", "q4_k"]),
        (("quantize", "--codec", "w4a16"), ["w4a16", "w4a16.g128"]),
        (("quantize", "--rule", "*ffn*=q6"), ["*ffn*=q6_k"]),
        (("quantize", "--rule", "*ffn*"), []),
        (("convert", "a", "b", "--to", "h"), ["hf"]),
        (("convert", "a", "b", "--resume", ""), ["auto", "required", "never"]),
        (("convert", "a"), ["(file)"]),
        (("convert", "a", "b", "--max-"), ["--max-memory"]),
        (("sweep", "a", "--recipes", "q4_k_m,trellis:3"), ["q4_k_m,trellis:3"]),
        (("completion", ""), ["bash", "zsh", "fish"]),
    ],
)
def test_completions(words, expected):
    assert completions(*words) == expected


def test_an_empty_word_lists_all_codecs_without_their_modules():
    found = completions("quantize", "--codec", "")
    assert {"q4_k", "i2_s.x86", "gptq", "trellis.3"} <= set(found)
    assert "gptq.4.g128" not in found


def test_a_family_lists_its_members():
    assert "gptq.4.g128.act" in completions("quantize", "--codec", "gptq.")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(polyquant, shell):
    script = polyquant("completion", shell)
    assert script.code == 0
    assert f"_POLYQUANT_COMPLETE={shell}_complete" in script.out
    assert not script.err


@pytest.fixture
def shell_environment(command_server, tmp_path) -> dict[str, str]:
    """The environment of a shell in which `polyquant` asks this process, and that reads no file of the user."""
    command_server.listen(tmp_path / "socket")
    (tmp_path / "polyquant").write_text(CLIENT)
    (tmp_path / "polyquant").chmod(0o755)
    places = dict.fromkeys(("HOME", "ZDOTDIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME"), str(tmp_path))
    path = f"{tmp_path}:{os.environ['PATH']}"
    return {**os.environ, **places, "PATH": path, "TERM": "dumb", "POLYQUANT_SERVER": str(tmp_path / "socket")}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["quan"], ["quantize"]),
        (["quantize", "a", "b", "--rule", "*ffn*", "=", "q6"], ["q6_k"]),  # bash splits words at = and :
        (["quantize", "a", "b", "--rule", "*ffn*", "="], None),
        (["sweep", "a", "--recipes", "q4_k_m,trellis", ":"], ["2", "3", "4", "5", "6", "7", "8"]),
        (["convert", "x", "y", "--to", "g"], ["gguf", "gptq"]),
    ],
)
def test_bash(shell_environment, words, expected):
    quoted = " ".join(f"'{word}'" for word in ("polyquant", *words))
    script = f"""
        eval "$(polyquant completion bash)"
        COMP_WORDS=({quoted}) COMP_CWORD={len(words)}
        _polyquant_completion polyquant
        printf '%s\\n' "${{COMPREPLY[@]}}"
        complete -p polyquant >&2
    """
    ran = subprocess.run(["bash", "-c", script], env=shell_environment, capture_output=True, text=True, check=True)
    found = ran.stdout.split()
    assert found == expected if expected is not None else "q4_k" in found
    assert ran.stderr.startswith("complete -o nosort -F _polyquant_completion polyquant")


TYPED = [
    ("qua", ["quantize"]),
    ("quantize a b --recipe q4_k", ["q4_k_m", "q4_k_s"]),
    ("quantize a b --codec q4_", ["q4_0", "q4_1", "q4_k"]),
    ("quantize a b --rule '*ffn*=q6", ["*ffn*=q6_k"]),
    ("convert a b --max-", ["--max-memory"]),
    ("sweep a --recipes q4_k_m,trellis:", [f"q4_k_m,trellis:{bits}" for bits in range(2, 9)]),
]
"""A line, and the suggestions of the Tab key after it."""


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(("line", "expected"), TYPED)
def test_fish(shell_environment, line, expected):
    script = f'polyquant completion fish | source; complete -C "polyquant {line}"'
    ran = subprocess.run(
        ["fish", "--no-config", "-c", script], env=shell_environment, capture_output=True, text=True, check=True
    )
    assert [found.partition("\t")[0] for found in ran.stdout.splitlines()] == expected, ran.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(("line", "expected"), TYPED)
def test_zsh(shell_environment, tmp_path, line, expected):
    """A terminal in which the Tab key is typed: the line is completed as far as it is certain, the rest is listed."""
    done, screen = tmp_path / "line", b""
    # as in a new ~/.zshrc; Control-X writes the line into a file, after the completion
    (tmp_path / ".zshrc").write_text(
        f"""
        eval "$(polyquant completion zsh)"
        unsetopt automenu
        PS1='> ' LISTMAX=1000
        show() {{ print -rn -- "$BUFFER" > {done}.part; mv {done}.part {done} }}
        zle -N show; bindkey '^X' show
        """
    )
    near, far = pty.openpty()
    with subprocess.Popen(
        ["zsh", "-d", "-i"], stdin=far, stdout=far, stderr=far, env=shell_environment, start_new_session=True
    ) as shell:
        os.close(far)
        tabs = "\t" if len(expected) == 1 else "\t\t"  # the second one lists
        os.write(near, f"polyquant {line}{tabs}\x18".encode())
        end = time.monotonic() + 60
        while not done.exists() and time.monotonic() < end:
            if select.select([near], [], [], 0.1)[0]:
                screen += os.read(near, 1 << 16)
        shell.kill()
    os.close(near)
    shown = screen.decode(errors="replace")
    assert done.exists(), shown
    completed = shlex.split(done.read_text())[-1]
    assert completed in expected if len(expected) == 1 else all(name.startswith(completed) for name in expected)
    assert len(expected) == 1 or all(name in shown for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["q4", "gptq."])
def test_a_tab_takes_less_than_a_third_of_a_second(word):
    """In processor time, so that other tests do not count; the members of a family need their module."""
    folder = str(Path(polyquant_package.__path__[0]).parent)
    env = {**os.environ, VARIABLE: "bash_complete", "COMP_CWORD": "5", "PYTHONPATH": folder}
    env["COMP_WORDS"] = f"polyquant\nquantize\na\nb\n--codec\n{word}"
    took = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-c", "import polyquant.cli as c; c.main()"]
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(took) < 0.3
