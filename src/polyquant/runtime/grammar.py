"""Generation of JSON, optionally of a JSON schema, with the llguidance package (extra `serve`).

llguidance compiles the schema to a grammar and computes, for each step, which tokens may come next. It works on the
bytes of the tokens, so a multi-byte character may be split over several tokens. Keywords that it does not implement
are rejected, never ignored.

Schemas are untrusted: they are first compiled in a separate process with limits (grammar_child.py). Afterwards
llguidance bounds the work per step and the memory of its automaton.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError, UnsupportedError, printable
from polyquant.runtime.limited import folders_of, run_limited
from polyquant.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

__all__ = ["ANY_OBJECT", "Grammars", "JsonConstraint"]

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of any JSON object."""
_MAX_SCHEMA = 64 << 10
"""In bytes."""
_KEPT = 16
"""Compiled schemas."""
_SECONDS = 1.0
"""Processor time to compile a schema; usual ones take milliseconds."""
_MEMORY = 512 << 20
_STACK = 1 << 20
"""Bytes of stack to compile a schema, an eighth of a thread's."""
_CHILD = Path(__file__).with_name("grammar_child.py")
_MAX_STATES = 50_000
"""States of the automaton of the lexer, of at most 2 kB each."""
_RULES: llguidance.JsonCompileOptions = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\n {0,16})?",  # as formatters write; without a bound, small models fill the context
    "lenient": False,
    "coerce_one_of": False,
}
"""Take precedence over the options that a schema may contain (`x-guidance`)."""
_SHOWN = 200
"""Characters of llguidance's messages, which quote the schema."""


class Grammars:
    """Compiles schemas for one tokenizer. Thread-safe.

    vocab: logits per step, which may exceed the tokenizer's size.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        self._table: llguidance.LLTokenizer | None = None
        self._compiled: dict[str, JsonConstraint] = {}
        self._lock = Lock()

    def json(self, schema: object) -> JsonConstraint:
        """Return the constraint of an answer to a JSON schema.

        Raises InputError for one that is too large, UnsupportedError for an invalid or unsupported one and without
        llguidance.
        """
        text = json.dumps(schema)
        if len(text) > _MAX_SCHEMA:
            raise InputError(
                "the JSON schema is too large", expected=f"at most {_MAX_SCHEMA} bytes", found=f"{len(text)} bytes"
            )
        constraint = self._compiled.get(text)
        if constraint is None:
            constraint = self._compile(text)
        with self._lock:
            self._compiled.pop(text, None)
            self._compiled[text] = constraint  # now the last one: the first is dropped
            if len(self._compiled) > _KEPT:
                del self._compiled[next(iter(self._compiled))]
            return constraint.copy()

    def _compile(self, schema: str) -> JsonConstraint:
        package = _package()
        _check(schema)  # without the lock: hostile schemas take a second each
        limits = package.LLParserLimits(max_lexer_states=_MAX_STATES, verbose_errors=False)
        grammar = package.LLMatcher.grammar_from_json_schema(schema, overrides=_RULES)
        with self._lock:
            table = self._prepared()
        constraint = JsonConstraint(package.LLMatcher(table, grammar, log_level=0, limits=limits), self._vocab)
        constraint.allowed()  # some schemas are found to be too complex, or to have no values, by the first step
        return constraint

    def _prepared(self) -> llguidance.LLTokenizer:
        """Return llguidance's table of the vocabulary, made on first use.

        It takes up to a second for 100,000 tokens, in which no other thread of Python runs.
        """
        if self._table is None:
            ends = sorted(i for i in self._tokenizer.ends if i < self._vocab)
            if not ends:
                raise UnsupportedError("JSON needs a model with an end token", file=self._tokenizer.file)
            body = self._tokenizer.to_json()
            try:
                self._table = _package().LLTokenizer(body, n_vocab=self._vocab, eos_token=ends)
            except ValueError as problem:
                raise UnsupportedError(
                    f"JSON is not supported with this tokenizer: {_line(problem)}", file=self._tokenizer.file
                ) from None
        return self._table


class JsonConstraint:
    """The progress of one answer through a grammar (runtime.sampling.Constraint)."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab: int) -> None:
        """Raises UnsupportedError for a matcher that rejects its grammar."""
        self._matcher, self._vocab = matcher, vocab
        self._check()

    def copy(self) -> JsonConstraint:
        """Return a constraint with the same progress, for another answer."""
        return JsonConstraint(self._matcher.deep_copy(), self._vocab)

    def allowed(self) -> NDArray[np.bool_]:
        """Return whether each token [vocab] may come next. Raises UnsupportedError for a schema that is too complex."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._vocab, bitorder="little").view(np.bool_)

    def accept(self, token: int) -> None:
        """Advance by the chosen token. Raises UnsupportedError as `allowed`."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _unsupported(self._matcher.get_error())


def _package() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UnsupportedError(
            "JSON output needs the package 'llguidance'", hint="pip install 'polyquant[serve]'"
        ) from None
    return llguidance


def _check(schema: str) -> None:
    """Compile a schema in a separate process. Raises UnsupportedError."""
    job = {
        "path": folders_of(("llguidance",)), "seconds": _SECONDS, "memory": _MEMORY, "stack": _STACK, "schema": schema,
        "rules": _RULES, "states": _MAX_STATES,
    }  # fmt: skip
    try:
        done = run_limited(_CHILD, job)
    except subprocess.TimeoutExpired:
        raise _unsupported("it takes too long to compile") from None
    if done.returncode != 0:  # out of time, stack or memory
        raise _unsupported("it is too complex")
    if problem := json.loads(done.stdout)["problem"]:
        raise _unsupported(problem)


def _unsupported(problem: object) -> UnsupportedError:
    return UnsupportedError(f"the JSON schema is not supported: {_line(problem)}")


def _line(problem: object) -> str:
    """Return a message on one line, shortened."""
    return printable(" ".join(str(problem).replace("<non-verbose/>", "").split()), _SHOWN)
