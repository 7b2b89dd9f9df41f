"""The harness runs our model class on tiny local tasks; its scores equal those of its built-in `hf` class."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from polyquant.analysis.demo import demo_model
from polyquant.errors import InputError, UnsupportedError

DEMO = demo_model("llama")
TASKS = Path(__file__).with_name("lm_eval_tasks")
PATHS = os.pathsep.join(str(Path(p).resolve()) for p in sys.path)

installed = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm_eval is not installed: pip install 'polyquant[lm-eval]'"
)


def examples(task):
    return [json.loads(line) for line in (TASKS / f"{task}.jsonl").read_text().splitlines()]


def requests(*arguments):
    return [SimpleNamespace(args=a) for a in arguments]


PAIRS = [(e["begin"], end) for e in examples("choice") for end in e["ends"]] + [("", "And it came")]
HF = [
    (-6.94988, False), (-31.02853, False), (-21.37777, False), (-1.82451, False), (-2.56583, True),
    (-20.68627, False), (-23.92529, False), (-4.61096, False), (-4.66977, False),
]  # fmt: skip
"""Reference results of lm_eval 0.4.13 `--model hf`, transformers 5.23.0, torch 2.13.0, float32, on demo/llama.

(log p, greedy) of PAIRS; loglikelihood_rolling (add_bos_token=False) and generate_until for the other tasks.
"""
HF_ROLLING = [-331.43609619140625, -2511.001708984375]
HF_ANSWERS = [", when the man was come to the king, that the", " Moses, How is the LORD God of Israel, and"]


@pytest.fixture(scope="module")
def lm():
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'polyquant[lm-eval]'")
    from polyquant.integrations.lm_eval.model import PolyquantLM

    return PolyquantLM(str(DEMO), activations="float")


@pytest.mark.slow
def test_log_likelihoods_equal_transformers(lm):
    for _ in range(2):  # the second time on a session that has read everything
        found = lm.loglikelihood(requests(*PAIRS), disable_tqdm=True)
        for (log_p, greedy), (expected, hf_greedy) in zip(found, HF, strict=True):
            assert log_p == pytest.approx(expected, abs=2e-4) and greedy == hf_greedy


@pytest.mark.slow
def test_rolling_log_likelihoods_equal_transformers(lm):
    texts = [(e["text"],) for e in examples("rolling")]
    assert len(lm.tok_encode(texts[1][0])) > lm.max_length  # more than one window
    found = lm.loglikelihood_rolling(requests(*texts), disable_tqdm=True)
    assert found == pytest.approx(HF_ROLLING, abs=5e-3)


@pytest.mark.slow
def test_answers_equal_transformers(lm):
    asked = {"until": ["\n", "."], "max_gen_toks": 12, "do_sample": False}
    found = lm.generate_until(requests(*((e["prompt"], asked) for e in examples("generate"))), disable_tqdm=True)
    assert found == HF_ANSWERS


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [3, "4", "auto", "auto:2"])
def test_answers_of_a_batch_are_the_same(lm, batch_size):
    from polyquant.integrations.lm_eval.model import PolyquantLM

    several = PolyquantLM(str(DEMO), activations="float", batch_size=batch_size)
    assert several.batch_size > 1
    lengths = [5, 1, 12, 3, 8, 2, 7]
    asked = requests(*((e["prompt"], {"max_gen_toks": n}) for e in examples("generate") for n in lengths))
    assert several.generate_until(asked, disable_tqdm=True) == lm.generate_until(asked, disable_tqdm=True)


@installed
@pytest.mark.parametrize("batch_size", [0, "many", "-1", 5000])
def test_batch_sizes_are_checked(batch_size):
    from polyquant.integrations.lm_eval.model import PolyquantLM

    with pytest.raises(InputError, match=r"batch_size is out of range.*1 to 1024, or auto"):
        PolyquantLM(str(DEMO), batch_size=batch_size)


@pytest.mark.slow
def test_a_shared_prefix_is_computed_once(lm, monkeypatch):
    fed = []
    decoder = lm.model.decoder
    states = decoder.states
    monkeypatch.setattr(decoder, "states", lambda tokens, cache: (fed.append(len(tokens)), states(tokens, cache))[1])
    context = "And it came to pass in those days, that there went out a decree from "
    pairs = [(context.rstrip(), end) for end in (" Caesar", " the king", " the LORD", " Egypt")]
    lm._session = lm.model.session()
    together = lm.loglikelihood(requests(*pairs), disable_tqdm=True)
    read = sum(fed)
    alone = []
    for pair in pairs:
        lm._session = lm.model.session()
        alone += lm.loglikelihood(requests(pair), disable_tqdm=True)
    assert [a for a, _ in together] == pytest.approx([a for a, _ in alone], abs=1e-4)
    shared = len(lm.tok_encode(context.rstrip())) - 1  # its last token is read each time, for the logits after it
    assert sum(fed) - read == read + 3 * shared


@pytest.mark.slow
def test_long_prompts_are_truncated_on_the_left(lm):
    long = "And it came to pass. " * 299 + "And it came to pass."
    ((log_p, _),) = lm.loglikelihood(requests((long, " And")), disable_tqdm=True)
    ids = lm.tok_encode(long + " And")[-(lm.max_length + 1) :]
    logits = lm.model.logits(ids[:-1])[-1].astype(np.float64)
    assert log_p == pytest.approx(logits[ids[-1]] - np.log(np.exp(logits).sum()), abs=1e-4)
    (answer,) = lm.generate_until(requests((long, {"max_gen_toks": 3, "until": None})), disable_tqdm=True)
    assert isinstance(answer, str) and answer


@pytest.mark.slow
def test_unscorable_requests_are_a_one_line_error(lm):
    with pytest.raises(InputError, match="max_gen_toks from 1 to 511"):
        lm.generate_until(requests(("And", {"max_gen_toks": 512})), disable_tqdm=True)
    with pytest.raises(UnsupportedError, match="base model"):
        lm.apply_chat_template([{"role": "user", "content": "Hello"}])


@pytest.mark.slow
def test_chat_templates_are_applied_and_continued(lm, monkeypatch):
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end_of_text|>{% endfor %}"
        "{% if add_generation_prompt %}[a]{% endif %}"
    )
    monkeypatch.setitem(lm.tokens.templates, "default", template)
    messages = [{"role": "user", "content": "Who?"}, {"role": "a", "content": "Moses"}]
    assert lm.chat_template(True) == template and lm.chat_template(False) is None
    prompt = lm.apply_chat_template(messages[:1])
    assert prompt == "<|begin_of_text|>[user]Who?<|end_of_text|>[a]"
    assert lm.tok_encode(prompt).count(0) == 1  # one BOS
    assert lm.apply_chat_template(messages, add_generation_prompt=False).endswith("[a]Moses")


def run_harness(tmp_path, *command):
    """All three tasks by the harness's own command line."""
    tasks = "polyquant_choice,polyquant_rolling,polyquant_generate"
    arguments = [
        "--model", "polyquant", "--model_args", f"pretrained={DEMO},activations=float",
        "--include_path", str(TASKS), "--tasks", tasks, "--output_path", str(tmp_path / "out"),
    ]  # fmt: skip
    settings = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": PATHS,
    }
    done = subprocess.run(
        [*command, *arguments], cwd=TASKS, env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    assert results["polyquant_choice"]["acc,none"] == 1.0
    nats = -sum(HF_ROLLING) / sum(len(e["text"].encode()) for e in examples("rolling"))
    assert results["polyquant_rolling"]["byte_perplexity,none"] == pytest.approx(np.exp(nats), rel=1e-4)
    assert results["polyquant_generate"]["exact_match,none"] == 1.0


@installed
@pytest.mark.slow
def test_the_harness_runs_through_our_module(tmp_path):
    run_harness(tmp_path, sys.executable, "-m", "polyquant.integrations.lm_eval")


@installed
@pytest.mark.slow
def test_the_harness_runs_through_its_command(tmp_path):
    from lm_eval.api import registry

    if not hasattr(registry, "import_plugins"):
        pytest.skip("this release of lm_eval looks for no plugins; releases after 0.4.13 do")
    if not entry_points(group="lm_eval.models", name="polyquant"):
        pytest.skip("polyquant is not installed, only importable: its entry points are not known")
    command = shutil.which("lm_eval", path=str(Path(sys.executable).parent))
    assert command is not None
    run_harness(tmp_path, command)


@installed
@pytest.mark.slow
def test_the_entry_point_names_the_registered_class():
    from lm_eval.api.registry import get_model

    found = entry_points(group="lm_eval.models", name="polyquant")
    if not found:
        pytest.skip("polyquant is not installed, only importable: its entry points are not known")
    (entry,) = found
    assert entry.load() is get_model("polyquant")


def test_without_the_harness_the_error_names_the_package(tmp_path):
    (tmp_path / "lm_eval.py").write_text("raise ImportError('No module named lm_eval')")
    done = subprocess.run(
        [sys.executable, "-m", "polyquant.integrations.lm_eval", "--model", "polyquant"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PATHS}"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.count("\n") == 1 and "pip install 'polyquant[lm-eval]'" in done.stderr
