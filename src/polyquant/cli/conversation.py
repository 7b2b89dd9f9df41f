"""A conversation on a terminal: one message per line, commands with a slash.

The oldest messages are dropped when the context is full.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from polyquant.cli.terminal import say, stream
from polyquant.errors import InputError, PolyquantError
from polyquant.runtime.chat import render_chat
from polyquant.runtime.generate import Generation, generate
from polyquant.runtime.model import Model
from polyquant.runtime.sampling import Sampling
from polyquant.runtime.session import Session

__all__ = ["Conversation"]

_COMMAND = re.compile(r"/[a-z]+")
_HELP = (
    "/help        this list",
    "/clear       forget the conversation",
    "/regenerate  answer the last message again",
    "/exit        leave (also Ctrl-D)",
    "Ctrl-C ends an answer early.",
)
_RESERVE = 256
"""Tokens that an answer should have room for, where the context is large enough."""


@dataclass(slots=True)
class Conversation:
    """opening: the system message, if there is one. figures: called with each answer, to print its statistics.

    regenerated: how often the last answer was regenerated.
    """

    model: Model
    opening: list[dict[str, str]]
    template: str | None
    sampling: Sampling
    max_tokens: int | None
    stop: tuple[str, ...]
    figures: Callable[[Generation], None] | None
    prompt_lookup: int = 0
    session: Session = field(init=False)
    messages: list[dict[str, str]] = field(init=False)
    regenerated: int = 0

    def __post_init__(self) -> None:
        self.session, self.messages = self.model.session(), list(self.opening)

    def hold(self) -> None:
        """Chat until /exit or the end of input. Ctrl-C ends an answer; at the prompt it raises KeyboardInterrupt."""
        with suppress(ImportError):  # where Python was built without it, lines are edited by the terminal alone
            import readline  # noqa: F401
        say("/help lists the commands", err=True)
        while True:
            try:
                line = input("you> ").strip()
            except EOFError:
                say()
                return
            if line in ("/exit", "/quit"):
                return
            if _COMMAND.fullmatch(line):
                self._obey(line)
            elif line:
                self.regenerated = 0
                self._ask(line)

    def _obey(self, command: str) -> None:
        if command == "/clear":
            self.messages = list(self.opening)
            say("(conversation forgotten)", err=True)
        elif command == "/regenerate" and len(self.messages) > len(self.opening):
            if self.sampling.temperature == 0:
                say("(at temperature 0 the answer does not change: start with --temperature 0.8)", err=True)
            self.regenerated += 1
            del self.messages[-1]
            self._ask(self.messages.pop()["content"])
        elif command == "/regenerate":
            say("(there is no answer yet)", err=True)
        else:
            if command != "/help":
                say(f"(no command {command})", err=True)
            for line in _HELP:
                say(line, err=True)

    def _ask(self, text: str) -> None:
        """Answer a message. Both are kept, unless no prompt can be made of it."""
        self.messages.append({"role": "user", "content": text})
        try:
            ids = self._prompt()
        except PolyquantError as problem:
            self.messages.pop()
            say(f"({problem})", err=True)
            return
        stream("model> ")
        pieces: list[str] = []
        answer = generate(
            self.model, ids, max_tokens=self.max_tokens, sampling=self._sampling(), stop=self.stop,
            session=self.session, prompt_lookup=self.prompt_lookup,
        )  # fmt: skip
        with suppress(KeyboardInterrupt):
            for token in answer:
                pieces.append(token.text)
                stream(token.text)
        say()
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        if answer.full:
            say(f"(the answer ends here: the context of {self.model.context} tokens is full)", err=True)
        elif answer.finish == "length":
            say(f"(the answer ends here: --max-tokens is {self.max_tokens})", err=True)
        if self.figures is not None:
            self.figures(answer)

    def _sampling(self) -> Sampling:
        """With another seed for each new answer to the same message."""
        seed = self.sampling.seed
        return self.sampling if seed is None else replace(self.sampling, seed=seed + self.regenerated)

    def _prompt(self) -> list[int]:
        """Token ids of the messages.

        If they leave no room for an answer, drop the oldest, down to half of the context: the rest is computed again,
        which should not happen at every turn. If it raises PolyquantError, nothing is dropped.
        """
        context, messages = self.model.context, list(self.messages)
        room = context - min(self.max_tokens or _RESERVE, context // 4)
        ids = self._ids(messages)
        while len(ids) > room and (count := self._oldest(messages, len(ids) - context // 2)):
            del messages[len(self.opening) : len(self.opening) + count]
            ids = self._ids(messages)
        if len(ids) > context:
            raise InputError(
                "the message is longer than the model's context", expected=f"at most {context} tokens", found=len(ids)
            )
        if dropped := len(self.messages) - len(messages):
            say(f"(the context of {context} tokens is full: the {dropped} oldest messages are dropped)", err=True)
        self.messages = messages
        return ids

    def _ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        tokenizer = self.model.tokenizer
        return tokenizer.encode(render_chat(tokenizer, messages, name=self.template), add_special=False)

    def _oldest(self, messages: Sequence[dict[str, str]], tokens: int) -> int:
        """Number of messages to drop to save `tokens` tokens: questions with their answers, never the last question."""
        count = 0
        for message in messages[len(self.opening) : -1]:
            if tokens <= 0 and count % 2 == 0:
                break
            tokens -= len(self.model.tokenizer.encode(message["content"], add_special=False))
            count += 1
        return count
