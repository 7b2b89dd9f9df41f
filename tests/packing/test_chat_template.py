"""Go templates for chat templates. GO has the text that Go's text/template rendered for messages and a Go template."""

from __future__ import annotations

import pytest

from polyquant.errors import InputError
from polyquant.packing.chat_template import GoTemplate, go_template
from polyquant.runtime.chat import render

jinja2 = pytest.importorskip("jinja2")

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
DEFAULT = CHATML.replace(
    "{% for message in messages %}",
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}",
)
ROLES = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'system' %}{{ '<<' + m.content + '>>' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}"
    "{% endfor %}"
)
EXACT = {
    "chatml": (
        CHATML,
        '{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n'
        "{{ end }}{{ end }}<|im_start|>assistant\n",
    ),
    "default system message": (
        DEFAULT,
        "{{ if not .System }}<|im_start|>system\nBe kind.<|im_end|>\n{{ end }}"
        '{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n'
        "{{ end }}{{ end }}<|im_start|>assistant\n",
    ),
    "roles": (
        ROLES,
        '{{ range .Messages }}{{ if eq .Role "system" }}<<{{ .Content }}>>'
        '{{ else if eq .Role "user" }}[INST] {{ .Content }} [/INST]'
        '{{ else if eq .Role "assistant" }} {{ .Content }}</s>{{ end }}{{ end }}',
    ),
}
UNFIT = {
    "trims": (CHATML.replace("message['content'] +", "message['content'] | trim +"), "changes messages"),
    "tools": (CHATML + "{% if tools %}{% endif %}", "uses tool"),
    "reasoning": (CHATML + "{# reasoning #}", "uses reasoning"),
    "drops the system message": (CHATML.replace("{{'<|im", "{% if message.role != 'system' %}{{'<|im", 1).replace(
        "{% endfor %}", "{% endif %}{% endfor %}"), "leaves out or repeats messages"),
    "no end of turn at the end": (CHATML.replace("'<|im_end|>\\n'", "('' if loop.last else '<|im_end|>\\n')"),
        "depends on its place"),
    "refuses": ("{{ raise_exception('no') }}", "cannot be rendered"),
    "not Jinja": ("{% for %}", "cannot be rendered"),
    "braces": (CHATML.replace("<|im_end|>", "{{ '{{' }}<|im_end|>").replace("'{{ '{{' }}", "'{{"), "writes braces"),
    "counts": (CHATML.replace("message['role']", "message['role'] ~ loop.index"), "depends on its place"),
}  # fmt: skip


def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def here(source: str, values: dict) -> str:
    """Render in this process, which is quicker; the templates of this file end."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    try:
        return environment.from_string(source).render(**values, raise_exception=refuse)
    except jinja2.TemplateError as problem:
        raise InputError(str(problem)) from None


def found(source: str, render=here) -> GoTemplate | str:
    def rendered(messages, answer):
        values = {"messages": [{"role": r, "content": c} for r, c in messages], "add_generation_prompt": answer}
        return render(source, {**values, "eos_token": "</s>", "tools": None})

    return go_template(source, rendered)


@pytest.mark.parametrize("case", EXACT)
def test_exact(case):
    source, text = EXACT[case]
    made = found(source)
    assert isinstance(made, GoTemplate), made
    assert made.text == text


def test_an_endless_template_is_stopped():
    source = "{% for i in range(100000000) %}{% for j in range(100000000) %}{% endfor %}{% endfor %}"
    assert "cannot be rendered" in str(found(source, render))


@pytest.mark.parametrize("case", UNFIT)
def test_no_counterpart(case):
    source, reason = UNFIT[case]
    made = found(source)
    assert isinstance(made, str) and reason in made
