"""JSON constraints: every answer is valid for its schema, regardless of the logits; hostile schemas are bounded."""

from __future__ import annotations

import json
import sys

import jsonschema
import numpy as np
import pytest

import polyquant as pq
from polyquant.analysis.demo import demo_model
from polyquant.errors import InputError, UnsupportedError
from polyquant.runtime import grammar
from polyquant.runtime.generate import generate
from polyquant.runtime.grammar import ANY_OBJECT, Grammars
from polyquant.runtime.sampling import Sampling

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["ä", "漢字", "c"]}, "maxItems": 3},
        "of": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "of"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["llama", "bitnet"])
def model(request):
    return pq.load(demo_model(request.param))


@pytest.fixture(scope="module")
def grammars(model):
    return Grammars(model.tokenizer, model.vocab)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("seed", range(3))
def test_answers_follow_the_schema(model, grammars, temperature, seed):
    sampling = Sampling(temperature=temperature, seed=seed)
    answer = generate(model, "Who?", max_tokens=300, sampling=sampling, constraint=grammars.json(PERSON))
    text = "".join(token.text for token in answer)
    assert answer.finish == "stop"
    jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("text", ['{"a":1}', '{"a": 1}', '{\n  "a": 1\n}', "{\n\n", "{  "])
def test_whitespace_is_that_of_formatters(model, grammars, text):
    constraint = grammars.json({"type": "object", "properties": {"a": {"type": "integer"}}})
    taken = 0
    for character in text:  # every ASCII character is a token
        token = model.tokenizer.encode(character, add_special=False)[-1]
        if not constraint.allowed()[token]:
            break
        constraint.accept(token)
        taken += 1
    assert taken == len(text) - (not text.endswith("}"))


def test_constraints_copy_their_progress(grammars):
    first = grammars.json({"type": "boolean"})
    token = int(np.flatnonzero(first.allowed())[0])
    other = first.copy()
    first.accept(token)
    assert other.allowed()[token] and (first.allowed() != other.allowed()).any()


def test_an_object_begins_with_a_brace(model, grammars):
    allowed = np.flatnonzero(grammars.json(ANY_OBJECT).allowed())
    assert {model.tokenizer.decode([int(i)])[:1] for i in allowed} == {"{"}


UNSUPPORTED = {
    "keyword": ({"not": {"type": "string"}}, "not"),
    "own options": ({"not": {"type": "string"}, "x-guidance": {"lenient": True}}, "not"),
    "type": ({"type": "strin"}, "Invalid type: strin"),
    "list": ([], "object schema"),
    "remote": ({"$ref": "http://localhost/schema"}, "not present"),
    "look-around": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "itself": ({"$ref": "#"}, "not supported"),
    "alternatives": ({"allOf": [{"anyOf": [{"properties": {f"{i}{k}": {}}, "required": [f"{i}{k}"]}
                                           for i in range(6)]} for k in range(6)]}, "too large"),
    "references": ({"$defs": {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(900)}
                    | {"d900": {}}, "$ref": "#/$defs/d0"}, "too complex"),
    "patterns": ({"patternProperties": {f"^a{i}b*$": {} for i in range(600)}, "additionalProperties": False},
                 "too complex"),
    "no value": ({"type": "integer", "minimum": 5, "maximum": 4}, "not supported"),
}  # fmt: skip


@pytest.fixture(scope="module")
def checked():
    model = pq.load(demo_model("llama"))
    return Grammars(model.tokenizer, model.vocab)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_schemas_are_one_line_errors(name, checked):
    schema, words = UNSUPPORTED[name]
    with pytest.raises(UnsupportedError, match=words) as caught:
        checked.json(schema)
    assert len(str(caught.value).splitlines()) == 1


def test_schemas_are_compiled_once(grammars, monkeypatch):
    first = grammars.json({"type": "null"})
    first.accept(int(np.flatnonzero(first.allowed())[0]))
    monkeypatch.setattr(grammar, "run_limited", None)
    again = grammars.json({"type": "null"})
    assert (again.allowed() != first.allowed()).any()
    with pytest.raises(TypeError):
        grammars.json({"type": "boolean", "description": "another"})


def test_a_few_compiled_schemas_are_kept(model, monkeypatch):
    monkeypatch.setattr(grammar, "_KEPT", 2)
    found = Grammars(model.tokenizer, model.vocab)
    for name in "abac":
        found.json({"const": name})
    assert [json.loads(text)["const"] for text in found._compiled] == ["a", "c"]


def test_large_schemas_are_rejected(grammars):
    with pytest.raises(InputError, match="too large"):
        grammars.json({"enum": ["x" * 70_000]})


def test_without_llguidance_a_hint(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'polyquant\[serve\]'"):
        Grammars(model.tokenizer, model.vocab).json(ANY_OBJECT)
