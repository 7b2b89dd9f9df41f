"""Modelfiles, as ollama/parser/parser.go reads them."""

from __future__ import annotations

import re

import pytest

import polyquant as pq
from polyquant.packing.modelfile import parse, read
from polyquant.packing.parameters import parameters

TEXT = '''# a comment
from ./m.gguf
PARAMETER temperature 0.7
parameter stop "a b"
PARAMETER stop <|end|>
SYSTEM """You are
"quoted" and brief.
"""
TEMPLATE "{{ .System }}
{{ .Prompt }}"
LICENSE MIT
LICENSE """
Apache
"""
MESSAGE user Hello: you
MESSAGE assistant """Hi
there"""
ADAPTER lora.gguf
RENDERER qwen3-coder
REQUIRES v0.14.0
'''


def test_all_commands(tmp_path):
    path = tmp_path / "Modelfile"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    found = read(path)
    assert (found.model, found.adapter) == (str(tmp_path / "m.gguf"), str(tmp_path / "lora.gguf"))
    assert found.parameters == [("temperature", "0.7"), ("stop", "a b"), ("stop", "<|end|>")]
    assert found.system == 'You are\n"quoted" and brief.\n'
    assert found.template == "{{ .System }}\n{{ .Prompt }}"
    assert found.licenses == ["MIT", "\nApache\n"]
    assert found.messages == [("user", "Hello: you"), ("assistant", "Hi\nthere")]
    assert (found.renderer, found.requires) == ("qwen3-coder", "0.14.0")
    values, notes = parameters([*found.parameters, ("mirostat", "1")])
    assert values == {"stop": ["a b", "<|end|>"], "temperature": 0.7}
    assert notes == ["parameter mirostat is left out: Ollama does not use it any more"]


BROKEN = {
    "no from": ("SYSTEM x", "has no FROM line"),
    "unknown": ("FROM x\nRUN rm -rf /", "line 2: the command 'RUN' is not known"),
    "nothing": ("FROM", "line 1: nothing follows 'FROM'"),
    "open quotes": ('FROM x\nSYSTEM """a\nb\n', 'line 2: the closing """ is missing'),
    "role": ("FROM x\nMESSAGE tool hi", "line 2: the role 'tool' is not known"),
    "version": ("FROM x\nREQUIRES 1", "line 2: REQUIRES is not a version"),
    "twice": ("FROM x\nFROM y", "line 2: a second FROM line is not supported"),
    "draft": ("FROM x\nDRAFT y", "line 2: the command 'DRAFT' is not known"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken(case):
    text, message = BROKEN[case]
    with pytest.raises(pq.InputError, match=re.escape(message)):
        parse(text, "Modelfile")


def test_not_text(tmp_path):
    (tmp_path / "Modelfile").write_bytes(b"FROM x\nSYSTEM \xff")
    with pytest.raises(pq.InputError, match=r"is not UTF-8 \(byte 14\)"):
        read(tmp_path / "Modelfile")
    (tmp_path / "Modelfile").write_text("FROM ./missing.gguf\n")
    with pytest.raises(pq.InputError, match="the file of the FROM line does not exist"):
        pq.pack(modelfile=tmp_path / "Modelfile", ollama=tmp_path / "s", name="a", host="h")
