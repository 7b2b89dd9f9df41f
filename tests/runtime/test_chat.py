"""Messages to a prompt, as transformers renders them; and bad templates, each with its own error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import polyquant
from polyquant.analysis.demo import demo_model
from polyquant.errors import InputError, UnsupportedError
from polyquant.runtime.chat import render, render_chat, template_of
from polyquant.tokenizers.tokenizer import open_tokenizer
from polyquant.types import Checkpoint

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = """{% if messages[0]['role'] == 'system' %}
    {% set system = messages[0]['content'] %}
    {% set messages = messages[1:] %}
{% endif %}
{{ bos_token }}
{%- for message in messages %}
    {% if loop.index0 is even %}
[INST] {% if loop.first and system is defined %}<<SYS>>{{ system | trim }}<</SYS>> {% endif %}{{ message.content | trim }} [/INST]
    {%- else %} {{ message.content }} {{ eos_token }}
    {% endif %}
{% endfor %}"""  # noqa: E501 - a published template
MIXED = (
    "{%- for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m | tojson }}|{{ m | "
    "tojson(indent=1) }}{% if loop.last %}{% break %}"
    "{% endif %}{%- endfor %}{% generation %}[{{ tools | length if tools else 'none' }}]{% endgeneration %}"
)
TALK = [
    {"role": "system", "content": " Be <brief> & true "},
    {"role": "user", "content": "Who are you? é"},
    {"role": "assistant", "content": "I\n"},
    {"role": "user", "content": "Hm"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
# By transformers 5.23: apply_chat_template(TALK, chat_template=..., tokenize=False, add_generation_prompt=True).
RENDERED = {
    CHATML: "<|im_start|>system\n Be <brief> & true <|im_end|>\n<|im_start|>user\nWho are you? "
    "é<|im_end|>\n<|im_start|>assistant\nI\n<|im_end|>\n<|im_start|>user\nHm<|im_end|>\n<|im_start|>assistant\n",
    LLAMA2: "<s>[INST] <<SYS>>Be <brief> & true<</SYS>> Who are you? é [/INST] I\n </s>\n[INST] Hm [/INST]",
    MIXED: '{"role": "system", "content": " Be <brief> & true "}|{\n "role": "system",\n "content": " Be <brief> & '
    'true "\n}{"role": "user", "content": "Who are you? é"}|{\n "role": "user",\n "content": "Who are you? '
    'é"\n}{"role": "assistant", "content": "I\\n"}|{\n "role": "assistant",\n "content": "I\\n"\n}{"role": "user", '
    '"content": "Hm"}|{\n "role": "user",\n "content": "Hm"\n}[none]',
}


@pytest.mark.parametrize("template", RENDERED, ids=["chatml", "llama2", "mixed"])
def test_as_transformers_renders_it(template):
    variables = {"messages": TALK, "tools": None, "add_generation_prompt": True, **SPECIAL}
    assert render(template, variables) == RENDERED[template]


def test_strftime_now_is_available():
    assert render("{{ strftime_now('%Y') | int > 2000 }}", {}) == "True"


BAD = {
    "{{ ''.__class__ }}": "forbidden attribute",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "forbidden attribute",
    "{{ messages['__class__'] }}": "forbidden attribute",
    "{{ messages | attr('__class__') }}": "forbidden attribute",
    "{{ messages | map(attribute='__class__') | list }}": "forbidden attribute",
    "{{ '{0.__class__}'.format(messages) }}": "forbidden attribute",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}": "forbidden attribute",
    "{{ raise_exception.__globals__ }}": "forbidden attribute",
    "{{ messages.append(1) }}": "forbidden attribute",
    "{% for i in range(10**12) %}x{% endfor %}": "Range too big",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "runs too long",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = [i, j] %}{% endfor %}{% endfor %}": (
        "runs too long"
    ),
    "{{ 10 ** (10 ** 8) }}": "runs too long",
    "{{ lipsum(n=100000) }}": "runs too long",
    "{{ 'x' * 10**10 }}": "too much memory",
    "{{ ([0] * 10**9) | length }}": "too much memory",
    "{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}": "writes too much",
    "{{ 'x' * 2000000 }}": "writes too much",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}": "RecursionError",
    "{{ raise_exception('no system role\x1b[2J') }}": r"rejects these messages: no system role\x1b[2J",
    "{% if %}": "not valid Jinja: line 1",
    "\n{{ 1 + }}": "not valid Jinja: line 2",
    "{{ messages[9].role.x }}": "fails on these messages: UndefinedError",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{% include '/etc/passwd' %}": "fails on these messages",
    "{{ 'a' | no_such_filter }}": "no_such_filter",
}


@pytest.mark.parametrize("template", BAD, ids=lambda t: t[:40])
def test_a_bad_template_is_a_one_line_error(template):
    with pytest.raises(InputError) as caught:
        render(template, {"messages": TALK}, file="model.gguf")
    text = str(caught.value)
    assert text.startswith("model.gguf: the chat template ") and BAD[template] in text and text.isprintable()


def test_a_dead_process_is_a_one_line_error(monkeypatch, tmp_path):
    for program, said in (
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("raise SystemExit('out')", "fails on these messages: out"),
    ):
        (tmp_path / "child.py").write_text(program)
        monkeypatch.setattr("polyquant.runtime.chat._CHILD", tmp_path / "child.py")
        with pytest.raises(InputError, match=said):
            render("x", {})


def test_the_process_does_not_inherit_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET", "x")
    (tmp_path / "child.py").write_text(
        "import os, sys; sys.stdin.read(); sys.stdout.write('{\"text\": \"%s\"}' % ' '.join(sorted(os.environ)))"
    )
    monkeypatch.setattr("polyquant.runtime.chat._CHILD", tmp_path / "child.py")
    assert "SECRET" not in render("x", {})


# ---------------------------------------------------------------- which template, which messages


def tokenizer_with(templates: object, folder: Path):
    source = demo_model("llama")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    if templates is not None:
        settings["chat_template"] = templates
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    files = {"tokenizer.json": source / "tokenizer.json", "tokenizer_config.json": folder / "tokenizer_config.json"}
    return open_tokenizer(Checkpoint("hf", folder, {}, files=files))


def test_templates_by_name(tmp_path):
    named = [
        {"name": "default", "template": "d"},
        {"name": "tool_use", "template": "t"},
        {"name": "rag", "template": "r"},
    ]
    tokenizer = tokenizer_with(named, tmp_path)
    tools = [{"type": "function"}]
    assert [
        render_chat(tokenizer, TALK),
        render_chat(tokenizer, TALK, tools=tools),
        render_chat(tokenizer, TALK, name="rag", tools=tools),
    ] == ["d", "t", "r"]
    with pytest.raises(UnsupportedError, match="no chat template is called 'x'; known: default, rag, tool_use"):
        template_of(tokenizer, "x")


def test_special_tokens_and_text_parts(tmp_path):
    tokenizer = tokenizer_with(
        "{{ bos_token }}{{ messages[0].content }}{{ pad_token }}{{ unk_token }}{{ messages[1].content }}", tmp_path
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert render_chat(tokenizer, messages) == "<|begin_of_text|>ab<|pad|>None"


WRONG = {
    "none": ([], "no messages"),
    "a text": (["hi"], "message 0 must have a role"),
    "no role": ([{"content": "x"}], "message 0 must have a role"),
    "a number": ([{"role": "user", "content": 1}], "content of message 0"),
    "a picture": ([{"role": "user", "content": [{"type": "image_url"}]}], "non-text part"),
    "a list of strings": ([{"role": "user", "content": ["x"]}], "non-text part"),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_messages(case, tmp_path):
    messages, said = WRONG[case]
    with pytest.raises((InputError, UnsupportedError), match=said):
        render_chat(tokenizer_with("x", tmp_path), messages)


def test_a_base_model_does_not_chat(tmp_path):
    with pytest.raises(UnsupportedError, match="no chat template: it is a base model; use a plain prompt"):
        render_chat(tokenizer_with(None, tmp_path), TALK)


def test_without_the_package(monkeypatch):
    monkeypatch.setattr("polyquant.runtime.limited.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'polyquant\[run\]'"):
        render("x", {})


def test_a_model_answers_messages(tmp_path):
    model = polyquant.load(demo_model("llama"))
    model.tokenizer.templates["default"] = "{{ bos_token }}{{ messages[-1].content }}"
    answer = model.chat([{"role": "user", "content": "And it came to pass"}], max_tokens=4)
    assert "".join(t.text for t in answer) == ", when the man"
    assert answer.prompt == (0, 298, 356, 474, 292, 603)  # one BOS: the template writes it
