"""docs/formats/msmodelslim.md matches the code."""

import re
from pathlib import Path

import pytest

from polyquant.formats.msmodelslim.consumers import TARGETS
from polyquant.formats.msmodelslim.description import KINDS

PAGE = (Path(__file__).resolve().parents[2] / "docs/formats/msmodelslim.md").read_text(encoding="utf-8")


def row(name):
    (found,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", PAGE, re.M)
    return [cell.strip() for cell in found.split(" | ")]


def test_every_type_is_listed():
    assert set(re.findall(r"^\| `(W\w+)` \|", PAGE, re.M)) == set(KINDS)


@pytest.mark.parametrize(("column", "target"), [(0, "vllm-ascend"), (1, "sglang")])
def test_types_of_each_target(column, target):
    layers = set(re.findall(r"W\w+", row("layers")[column]))
    experts = set(re.findall(r"W\w+", row("experts")[0]))
    assert layers == TARGETS[target].layers & set(KINDS)
    assert experts == TARGETS[target].experts & set(KINDS)
