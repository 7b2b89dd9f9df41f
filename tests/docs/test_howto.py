"""The pages in docs/howto are those of the planner."""

from pathlib import Path

import pytest

import howto_pages
from polyquant import registry
from polyquant.types import Action

FOLDER = Path(__file__).resolve().parents[2] / "docs/howto"


def test_pages_are_up_to_date():
    stored = {page.name: page.read_text(encoding="utf-8") for page in FOLDER.glob("*.md")}
    assert stored == howto_pages.pages(), "run: PYTHONPATH=src python scripts/howto_pages.py"


@pytest.mark.parametrize(
    ("codec", "target", "action"),
    [
        ("q4_k", "gguf", Action.COPY),
        ("q4_k", "hf", Action.DEQUANTIZE),
        ("gptq.4.g128", "gguf", Action.TRANSCODE),
        ("gptq.4.g128.act", "gguf", Action.DEQUANTIZE),
        ("exl3.3.mul1", "trellis-v3", Action.TRANSCODE),
        ("hf_mxfp4", "gguf", Action.TRANSCODE),
    ],
)
def test_classes(codec, target, action):
    assert howto_pages.outcome(registry.codec(codec), target)[0] is action


@pytest.mark.parametrize("source", registry.FORMATS)
def test_plans_agree_with_the_classes(source, tmp_path):
    """Unless the plan is refused, a model gets the class that the page has for its codec."""
    agreed = 0
    for codec, path in howto_pages.samples(tmp_path, source):
        for target in registry.FORMATS:
            plan, problem = howto_pages.example(path, target)
            if not problem and codec in plan:
                action, _ = howto_pages.outcome(registry.codec(codec), target)
                agreed += plan[codec].startswith(howto_pages.CLASSES[action])
    assert agreed >= 2
