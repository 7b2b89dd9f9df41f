"""Completion of shells: by click's own interface, and in a real bash."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["quan"], ["quantize"]),
        (["quantize", "a", "b", "--rule", "*ffn*", "=", "q6"], ["q6_k"]),  # bash splits words at = and :
        (["quantize", "a", "b", "--rule", "*ffn*", "="], None),
        (["sweep", "a", "--recipes", "q4_k_m,trellis", ":"], ["2", "3", "4", "5", "6", "7", "8"]),
        (["convert", "x", "y", "--to", "g"], ["gguf"]),
    ],
)
def test_bash(command_server, tmp_path, words, expected):
    command_server.listen(tmp_path / "socket")
    (tmp_path / "polyquant").write_text(CLIENT)
    (tmp_path / "polyquant").chmod(0o755)
    quoted = " ".join(f"'{word}'" for word in ("polyquant", *words))
    script = f"""
        eval "$(polyquant completion bash)"
        COMP_WORDS=({quoted}) COMP_CWORD={len(words)}
        _polyquant_completion polyquant
        printf '%s\\n' "${{COMPREPLY[@]}}"
        complete -p polyquant >&2
    """
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "POLYQUANT_SERVER": str(tmp_path / "socket")}
    ran = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True)
    found = ran.stdout.split()
    assert found == expected if expected is not None else "q4_k" in found
    assert ran.stderr.startswith("complete -o nosort -F _polyquant_completion polyquant")


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
