"""The plugin of the command-line tool llm, through llm's own command line."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import polyquant as pq
from polyquant.analysis.demo import demo_model

VECTORS = Path(__file__).parents[1] / "vectors"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
CHOICE = {
    "type": "object", "properties": {"size": {"enum": ["small", "large"]}}, "required": ["size"],
    "additionalProperties": False,
}  # fmt: skip
ENCODER = VECTORS / "architectures" / "bert"
pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("llm", "tokenizers", "jinja2")),
    reason="llm is not installed: pip install 'polyquant[llm]'",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The demo model with a chat template, as a GGUF file."""
    folder = tmp_path_factory.mktemp("llm")
    shutil.copytree(demo_model("llama"), folder / "hf", copy_function=shutil.copyfile)
    file = folder / "hf" / "tokenizer_config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    pq.convert(folder / "hf", folder / "tiny.gguf", to="gguf", codec="q8_0")
    return folder / "tiny.gguf"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that runs `llm ...` in an empty folder of settings -> (exit code, output)."""
    from click.testing import CliRunner
    from llm.cli import cli
    from llm.plugins import load_plugins, pm

    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "settings"))
    load_plugins()
    plugin = import_module("polyquant.integrations.llm_plugin")
    if not pm.is_registered(plugin):
        pm.register(plugin)
    if "polyquant" not in cli.commands:
        plugin.register_commands(cli)

    def run(*arguments, stdin=None):
        monkeypatch.setattr(sys, "argv", ["llm", *map(str, arguments)])
        done = CliRunner().invoke(cli, [str(a) for a in arguments], input=stdin)
        return done.exit_code, done.output

    return run


def chat(model, *messages, **options):
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 9, messages, strict=False)]
    return "".join(t.text for t in pq.load(model).chat(turns, **options))


def test_the_entry_point():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module = import_module(project["entry-points"]["llm"]["polyquant"])
    assert callable(module.register_models) and callable(module.register_commands)


# ---------------------------------------------------------------- models


def test_add_list_prompt_remove(run, model):
    assert run("polyquant", "list") == (0, "no models: llm polyquant add NAME PATH\n")
    assert run("polyquant", "add", "tiny", model) == (0, f"tiny: {model} (text)\n")
    assert run("polyquant", "list") == (0, f"tiny: {model}\n")
    assert "polyquant: polyquant/tiny (aliases: tiny)" in run("models")[1]
    want = chat(model, "Who are you?", max_tokens=12)
    assert run("-m", "tiny", "Who are you?", "-o", "max_tokens", 12) == (0, want + "\n")
    assert run("-m", "polyquant/tiny", "Who are you?", "-o", "max_tokens", 12, "--no-stream") == (0, want + "\n")
    assert run("polyquant", "remove", "tiny")[0] == 0
    assert run("-m", "tiny", "x")[0] == 1
    assert model.exists()


@pytest.mark.parametrize("how", [["-m", "polyquant/{}"], ["--model=polyquant/{}"]])
def test_a_path_needs_no_name(run, model, how):
    code, out = run(*(part.format(model) for part in how), "Who are you?", "-o", "max_tokens", 5)
    assert (code, out) == (0, chat(model, "Who are you?", max_tokens=5) + "\n")


def test_a_conversation_continues(run, model):
    run("polyquant", "add", "tiny", model)
    _, first = run("-m", "tiny", "Who are you?", "-o", "max_tokens", 5)
    _, second = run("-c", "And then?", "-o", "max_tokens", 5)
    assert second == chat(model, "Who are you?", first.removesuffix("\n"), "And then?", max_tokens=5) + "\n"
    logged = json.loads(run("logs", "--json")[1])
    assert logged[0]["output_tokens"] == 5 and logged[0]["input_tokens"] > 5


def test_a_chat_reuses_the_session(run, model):
    import llm

    run("polyquant", "add", "tiny", model)
    talk = llm.get_model("tiny").conversation()
    first = talk.prompt("Who are you?", max_tokens=5).text()
    second = talk.prompt("And then?", max_tokens=5)
    assert second.text() == chat(model, "Who are you?", first, "And then?", max_tokens=5)
    _, _, session = talk.model._loaded
    assert len(session.tokens) >= second.input_tokens


def test_system_prompts_options_and_seeds(run, model):
    run("polyquant", "add", "tiny", model)
    options = ["-o", "temperature", 1.5, "-o", "top_k", 20, "-o", "seed", 3, "-o", "max_tokens", 12]
    drawn = run("-m", "tiny", "Hi", "-s", "Be brief.", *options)
    assert drawn[0] == 0 and drawn == run("-m", "tiny", "Hi", "-s", "Be brief.", *options)
    want = "".join(t.text for t in pq.load(model).chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        temperature=1.5, top_k=20, seed=3, max_tokens=12,
    ))  # fmt: skip
    assert drawn[1] == want + "\n"
    raw = "".join(t.text for t in pq.load(model).generate("Once upon", max_tokens=4))
    assert run("-m", "tiny", "Once upon", "-o", "raw", 1, "-o", "max_tokens", 4) == (0, raw + "\n")


@pytest.mark.skipif(
    find_spec("llguidance") is None, reason="llguidance is not installed: pip install 'polyquant[serve]'"
)
def test_a_schema_constrains_the_answer(run, model):
    run("polyquant", "add", "tiny", model)
    code, out = run("-m", "tiny", "A dog", "--schema", json.dumps(CHOICE), "-o", "max_tokens", 90)
    assert code == 0 and json.loads(out)["size"] in ("small", "large")


def test_embeddings(run, tmp_path):
    pq.convert(ENCODER, tmp_path / "bert.gguf", to="gguf", codec="f32")
    code, out = run("polyquant", "add", "bert", tmp_path / "bert.gguf")
    assert (code, out.endswith("(embeddings)\n")) == (0, True)
    assert "polyquant/bert" not in run("models")[1]
    want = pq.load(tmp_path / "bert.gguf").embed(["hello", "world"])
    for ask in (["-m", "bert"], ["-m", f"polyquant/{tmp_path / 'bert.gguf'}"]):
        code, out = run("embed", *ask, "-c", "hello", "-f", "json")
        assert code == 0, out
        np.testing.assert_allclose(json.loads(out), want[0], atol=1e-6)
    import llm

    many = list(llm.get_embedding_model("bert").embed_multi(["hello", "world"]))
    np.testing.assert_allclose(many, want, atol=1e-6)


# ---------------------------------------------------------------- errors


def one_line(result, *words):
    code, out = result
    assert code == 1 and out.startswith("Error: ") and out.count("\n") == 1, out
    assert all(word in out for word in words), out


def test_errors_are_one_line(run, model, tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(20))
    one_line(run("polyquant", "add", "x", tmp_path / "broken.gguf"), "broken.gguf")
    one_line(run("polyquant", "add", "x", tmp_path / "absent.gguf"), "absent.gguf")
    one_line(run("polyquant", "add", "-x y".strip("-"), model), "not a name for a model")
    one_line(run("polyquant", "remove", "x"), "no model of that name was added")
    one_line(run("-m", f"polyquant/{tmp_path / 'absent.gguf'}", "Hi"), "absent.gguf")
    one_line(run("-m", f"polyquant/{model}", "Hi", "-o", "temperature", -1), "temperature")
    one_line(run("-m", f"polyquant/{model}", "x" * 1_000_000), "longer than the model's context")


def test_a_base_model_takes_one_prompt(run):

    ask = ["-m", f"polyquant/{demo_model('llama')}", "-o", "max_tokens", 3]
    want = "".join(t.text for t in pq.load(demo_model("llama")).generate("Once", max_tokens=3))
    assert run(*ask, "Once") == (0, want + "\n")
    one_line(run(*ask, "Once", "-s", "Be brief."), "it is a base model", "-o raw 1")


def test_a_broken_list_does_not_break_llm(run, tmp_path):
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "polyquant.json").write_text('{"x": 1}')
    code, out = run("models")
    assert code == 0 and "polyquant.json: a model has the wrong type" in out
    one_line(run("polyquant", "list"), "polyquant.json")
