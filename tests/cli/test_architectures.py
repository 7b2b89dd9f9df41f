"""polyquant architectures: every record, one line each."""

from __future__ import annotations

import json
import subprocess
import sys

from polyquant import registry


def _printed(*words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "polyquant", "architectures", *words], capture_output=True, text=True, check=True
    ).stdout


def test_every_architecture_is_listed():
    classes = {record.class_name for record in registry.architectures()}
    lines = _printed().splitlines()
    assert classes <= {line.split()[0] for line in lines if line}
    listed = {known["class_name"]: known for known in json.loads(_printed("--format", "json"))}
    assert classes <= set(listed)
    assert listed["LlamaForCausalLM"]["runs"] is True and listed["LlamaForCausalLM"]["name"] == "llama"
