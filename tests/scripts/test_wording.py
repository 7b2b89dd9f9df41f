"""The wording check finds phrases that read as translated in docstrings, comments and messages."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/wording.py"

TRANSLATED = """\
What a reader gets instead of floats.
what a column weighs
Where the tile begins in the file.
Whether two readers cut the probe in the same way.
Names of files, and of what they contain.
Of the columns of two arrays.
It fits. That it is a folder, the format declares.
The name is no file.
A reader that knows nothing about tiles.
All tensors but the last one.
The index is built anew.
A key that nobody reads.
Files of strangers are parsed in a child process.
Repair mends the description.
Codes are whole numbers.
The size is known beforehand.
The scales are beside the codes.
A norm behind each layer.
Takes so many tokens.
Layers that are alike share a row.
The native twin of this function.
The verb that needs it imports it.
The states of a text.
A norm without its numbers.
The file in which the tensor lies.
The shape stands in the header.
As config.json says it.
The format is asked for its options.
The weight goes through floats.
Rows are put together by the caller.
A package brings its codec.
Take up an unfinished job.
Which columns weigh most.
Rows that are turned back.
The part is not there.
The file can only be looked at.
One scale a row.
The tensor has another shape.
Each expert has a file of its own.
Whatever the file contains.
It refuses where the file does so.
"""

PLAIN = """\
Return the floats of a weight, float32 [N, K]. Raises CodecError if a part does not fit.
True if both pre-tokenizers split the probe in the same way.
Print the plan with exact sizes and stop.
The file is not a GGUF file: expected the magic bytes 'GGUF'.
There are no tensors in this folder.
The journal is no longer needed.
Affine-quantized integers with one scale per row.
How large is this file?
Continue a prompt, or chat.
Positions are rotated by pairs of dimensions; `what it says` is code.
"""


@pytest.fixture
def wording(monkeypatch):
    spec = importlib.util.spec_from_file_location("wording", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "wording", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("text", TRANSLATED.splitlines())
def test_translated(wording, text):
    assert wording.hit(wording.Passage(Path("a.py"), 1, text)) is not None


@pytest.mark.parametrize("text", PLAIN.splitlines())
def test_plain(wording, text):
    assert wording.hit(wording.Passage(Path("a.py"), 1, text)) is None


def test_python(wording):
    source = '''"""A module that is no reader."""

class A:
    """What it holds."""

    def f(self):
        """Return it.

        Its scales lie in another file.
        """
        # the first of
        # so many comments
        raise InputError("the value is no number", hint=f"take {x}, which nobody reads")


CODES = {"A001": ("the header of the tensor lies", 1), "short": "is no number"}
'''
    hits = [h for p in wording.passages(Path("a.py"), source) if (h := wording.hit(p))]
    assert {(h.passage.line, h.phrase) for h in hits} == {
        (1, "is no r"), (4, "What"), (7, "lie"), (11, "so many"),
        (13, "is no n"), (13, "nobody"), (16, "lies"),
    }  # fmt: skip


def test_cpp(wording):
    source = 'int a;  // what it is\n// A block of\n// whole\n// numbers.\nauto url = "http://nobody";\n'
    found = list(wording.passages(Path("a.cpp"), source))
    assert [(p.line, p.text) for p in found] == [(1, "what it is\nA block of\nwhole\nnumbers.")]


def test_exit_status(wording, tmp_path, capsys):
    plain = "".join(f"x = {i}  # the index of row {i}\n\n" for i in range(200))
    path = tmp_path / "a.py"
    path.write_text(plain)
    assert wording.main([str(path)]) == 0
    assert "0 of 200" in capsys.readouterr().out
    path.write_text(plain + "y = 1  # a key that nobody reads\n\n" * 3)
    assert wording.main([str(path)]) == 1
    out = capsys.readouterr().out
    assert "a.py:401: 'nobody' (no one, a caller, a user)" in out
    assert "3 of 203 docstrings, comments and messages read as translated (1.5%)" in out
