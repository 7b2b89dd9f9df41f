"""The models of the plugin: text with streaming, conversations, sampling options and JSON schemas; embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Literal

import llm
from pydantic import Field

from polyquant.errors import PolyquantError, UnsupportedError
from polyquant.runtime.chat import render_chat
from polyquant.runtime.generate import generate
from polyquant.runtime.grammar import Grammars
from polyquant.runtime.load import load
from polyquant.runtime.model import Model
from polyquant.runtime.sampling import Sampling
from polyquant.runtime.session import Session

__all__ = ["PolyquantEmbedding", "PolyquantModel"]

_NOT_SAMPLING = ("max_tokens", "context", "activations", "threads", "raw")


class PolyquantModel(llm.Model):
    """A model that generates text. It is loaded at its first prompt, and keeps the state of the last conversation."""

    can_stream = True
    supports_schema = True

    class Options(llm.Options):
        """Options after -o. Sampling that is not given is the one that the model's files recommend, else greedy."""

        temperature: float | None = Field(default=None, description="0 is greedy")
        top_k: int | None = Field(default=None, description="sample from the K most likely tokens")
        top_p: float | None = Field(
            default=None, description="sample from the most likely tokens of this total probability"
        )
        min_p: float | None = Field(default=None, description="drop tokens less likely than this times the best one")
        repetition_penalty: float | None = Field(default=None, description="above 1 makes recent tokens less likely")
        frequency_penalty: float | None = Field(default=None, description="subtracted once per use of a token")
        presence_penalty: float | None = Field(default=None, description="subtracted from used tokens")
        seed: int | None = Field(default=None, description="the same seed samples the same text")
        max_tokens: int | None = Field(default=None, description="maximum tokens of an answer")
        raw: bool = Field(default=False, description="continue the prompt, without a chat template")
        context: int | None = Field(default=None, description="maximum tokens of prompt and answer")
        activations: Literal["int8", "float"] = Field(default="int8", description="float is more exact and slower")
        threads: int | None = Field(default=None, description="threads of the kernels")

    def __init__(self, model_id: str, path: str) -> None:
        self.model_id, self.path = model_id, path
        self._loaded: tuple[Any, Model, Session] | None = None

    def __str__(self) -> str:
        return f"polyquant: {self.model_id}"

    def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.Response, conversation: llm.Conversation | None
    ) -> Iterator[str]:
        """Yield the answer in pieces. Raises llm.ModelError with our one-line message."""
        try:
            yield from self._answer(prompt, response)
        except PolyquantError as problem:
            raise llm.ModelError(str(problem)) from None

    def _answer(self, prompt: Any, response: Any) -> Iterator[str]:
        options = prompt.options
        model, session = self._open(options)
        given = {k: v for k, v in options.model_dump().items() if v is not None and k not in _NOT_SAMPLING}
        messages = _messages(prompt)
        templates = model.tokenizer.templates
        if options.raw or not templates:
            if not options.raw and any(m["role"] != "user" for m in messages):
                raise UnsupportedError(
                    "the model has no chat template: it is a base model", file=model.tokenizer.file,
                    hint="use one prompt without a system prompt, or -o raw 1",
                )  # fmt: skip
            text, special = "".join(m["content"] for m in messages), True
        else:
            text, special = render_chat(model.tokenizer, messages), False
        answer = generate(
            model, text, max_tokens=options.max_tokens, sampling=Sampling(**{**model.recommended.values, **given}),
            session=session, add_special=special,
            constraint=Grammars(model.tokenizer, model.vocab).json(prompt.schema) if prompt.schema else None,
        )  # fmt: skip
        for token in answer:
            yield token.text
        response.set_usage(input=answer.prompt_tokens, output=answer.generated)
        response.response_json = {"finish": answer.finish, "tokens_per_second": round(answer.rate, 2)}

    def _open(self, options: Any) -> tuple[Model, Session]:
        """Return the model and its session, loaded again if an option of loading differs."""
        key = options.context, options.activations, options.threads
        if self._loaded is None or self._loaded[0] != key:
            context, activations, threads = key
            model = load(self.path, activations=activations, context=context, threads=threads)
            self._loaded = key, model, model.session()
        return self._loaded[1:]


def _messages(prompt: Any) -> list[dict[str, Any]]:
    """Return the conversation with this prompt. Raises UnsupportedError for parts other than text."""
    messages: list[dict[str, Any]] = []
    for message in prompt.messages:
        texts = []
        for part in message.parts:
            text = getattr(part, "text", None)
            if not isinstance(text, str):
                raise UnsupportedError("only text can be in a conversation", found=type(part).__name__)
            texts.append(text)
        messages.append({"role": str(message.role), "content": "".join(texts)})
    return messages


class PolyquantEmbedding(llm.EmbeddingModel):
    """A model that gives embeddings, pooled as its files specify. It is loaded at its first text."""

    batch_size = 32

    def __init__(self, model_id: str, path: str) -> None:
        self.model_id, self.path = model_id, path

    def __str__(self) -> str:
        return f"polyquant: {self.model_id}"

    @cached_property
    def _model(self) -> Model:
        return load(self.path)

    def embed_batch(self, items: Iterable[str | bytes], *, key: str | None = None) -> Iterator[list[float]]:
        """Yield the embedding of each text. Raises llm.ModelError with our one-line message."""
        texts = [str(item) for item in items]
        try:
            vectors: list[list[float]] = self._model.embed(texts).tolist() if texts else []
        except PolyquantError as problem:
            raise llm.ModelError(str(problem)) from None
        yield from vectors
