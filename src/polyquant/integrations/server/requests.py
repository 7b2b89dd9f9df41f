"""The bodies of /v1/completions and /v1/chat/completions, validated before any computation.

Names and defaults are OpenAI's, except that sampling recommended by the model's files comes first; `top_k`, `min_p` and
`repetition_penalty` are vLLM's. Unsupported fields that would affect the answer are rejected, never ignored; fields
without effect (`user`, `metadata`, ...) are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from polyquant.integrations.server.fields import Fields, wrong
from polyquant.integrations.server.refusal import RequestError
from polyquant.runtime.grammar import ANY_OBJECT
from polyquant.runtime.recommended import ALL_TOKENS
from polyquant.runtime.sampling import Sampling

__all__ = [
    "GenerationRequest", "Message", "Prompt", "chat_request", "completion_request", "is_ids", "no_model",
    "requested_model",
]  # fmt: skip

Prompt: TypeAlias = str | tuple[int, ...]
Message: TypeAlias = Mapping[str, str]

_NONE: Mapping[str, Any] = {}
MAX_CHOICES = 64  # prompts x n per request
MAX_STOPS = 4
MAX_TOP = 20  # alternatives per token in a chat; MAX_COMPLETION_TOP in completions
MAX_COMPLETION_TOP = 5
MAX_BIASES = 1024
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat is limited only by the context

_HARMLESS = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "prediction",
)
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request.

    `messages` for a chat, otherwise `prompts`; n answers each. max_tokens None: up to the full context. logprobs:
    return log probabilities, with `top` alternatives per token. token_ids: return token ids. schema: the JSON schema of
    the answer, None for any text.
    """

    chat: bool
    prompts: tuple[Prompt, ...]
    messages: tuple[Message, ...]
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    n: int
    stream: bool
    include_usage: bool
    logprobs: bool
    top: int
    token_ids: bool
    schema: Any


def completion_request(body: Any, defaults: Mapping[str, Any] = _NONE) -> GenerationRequest:
    """Parse the body of /v1/completions. defaults: fields of Sampling recommended by the model. Raises RequestError."""
    fields = Fields(body)
    prompts = _prompts(fields.get("prompt"))
    fields.neutral("suffix", "")
    fields.neutral("echo", False)
    fields.neutral("best_of", 1)
    logprobs = fields.integer("logprobs", None, low=0, high=MAX_COMPLETION_TOP)
    limit = fields.integer("max_tokens", COMPLETION_TOKENS, low=1, high=1 << 31)
    return _request(fields, prompts=prompts, messages=(), max_tokens=limit, logprobs=logprobs, defaults=defaults)


def chat_request(body: Any, defaults: Mapping[str, Any] = _NONE) -> GenerationRequest:
    """Parse the body of /v1/chat/completions. defaults: as of `completion_request`. Raises RequestError."""
    fields = Fields(body)
    messages = _messages(fields.get("messages"))
    fields.neutral("tools", [])
    fields.neutral("tool_choice", "none", "auto")
    fields.neutral("functions", [])
    fields.neutral("function_call", "none", "auto")
    fields.neutral("modalities", ["text"])
    top = fields.integer("top_logprobs", 0, low=0, high=MAX_TOP)
    logprobs = top if fields.boolean("logprobs") else None
    if top and logprobs is None:
        raise wrong("top_logprobs", "absent unless 'logprobs' is true", top)
    old = fields.integer("max_tokens", None, low=1, high=1 << 31)
    new = fields.integer("max_completion_tokens", None, low=1, high=1 << 31)
    if old is not None and new is not None and old != new:
        raise wrong("max_tokens", "equal to 'max_completion_tokens' if both are given", old)
    limit = new if new is not None else old
    return _request(fields, prompts=(), messages=messages, max_tokens=limit, logprobs=logprobs, defaults=defaults)


def _request(
    fields: Fields,
    *,
    prompts: tuple[Prompt, ...],
    messages: tuple[Message, ...],
    max_tokens: int | None,
    logprobs: int | None,
    defaults: Mapping[str, Any],
) -> GenerationRequest:
    """Parse the fields common to both, and reject unknown ones."""
    n = fields.integer("n", 1, low=1, high=MAX_CHOICES) or 1
    if n * max(1, len(prompts)) > MAX_CHOICES:
        raise wrong("n", f"small enough: at most {MAX_CHOICES} answers per request (prompts x n)", n)
    top_k = fields.integer("top_k", defaults.get("top_k", 0), low=-1, high=1 << 31) or 0
    seed = fields.integer("seed", None, low=-(1 << 63), high=(1 << 64) - 1)
    sampling = Sampling(
        temperature=fields.number("temperature", defaults.get("temperature", 1.0), low=0, high=2),
        top_k=max(0, top_k),  # vLLM writes "off" as -1
        top_p=fields.number("top_p", defaults.get("top_p", 1.0), low=0, high=1, above=True),
        min_p=fields.number("min_p", defaults.get("min_p", 0.0), low=0, high=1),
        repetition_penalty=fields.number(
            "repetition_penalty", defaults.get("repetition_penalty", 1.0), low=0, high=10, above=True
        ),
        repetition_window=defaults.get("repetition_window", ALL_TOKENS),  # vLLM's: all tokens so far
        seed=None if seed is None else seed % (1 << 64),
        frequency_penalty=fields.number("frequency_penalty", 0.0, low=-2, high=2),
        presence_penalty=fields.number("presence_penalty", 0.0, low=-2, high=2),
        logit_bias=_biases(fields.get("logit_bias")),
    )
    stop = _stops(fields.get("stop"))
    stream = fields.boolean("stream")
    include_usage = _include_usage(fields.get("stream_options"), stream)
    token_ids, schema = fields.boolean("return_token_ids"), _schema(fields.get("response_format"))
    fields.finish((*_HARMLESS, "model"))
    return GenerationRequest(
        chat=bool(messages), prompts=prompts, messages=messages, max_tokens=max_tokens, sampling=sampling, stop=stop,
        n=n, stream=stream, include_usage=include_usage, logprobs=logprobs is not None, top=logprobs or 0,
        token_ids=token_ids, schema=schema,
    )  # fmt: skip


def requested_model(body: Any, names: Sequence[str]) -> str:
    """Return the model that a request names. Raises RequestError unless it is one of `names`."""
    requested = Fields(body).text("model")
    if requested is None:
        raise RequestError(
            f"'model' is missing; this server has {_listed(names)}", code="missing_parameter", param="model"
        )
    if requested not in names:
        raise no_model(requested, names)
    return requested


def no_model(requested: str, names: Sequence[str]) -> RequestError:
    """Return the error for a model that this server does not have."""
    return RequestError(
        f"the model '{requested[:100]}' does not exist; this server has {_listed(names)}",
        status=404,
        code="model_not_found",
        param="model",
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _biases(value: Any) -> dict[int, float]:
    """Return token id -> bias from an object whose keys are ids as strings."""
    if value is None:
        return {}
    expected = "an object of token ids and numbers from -100 to 100"
    if not isinstance(value, Mapping):
        raise wrong("logit_bias", expected, value)
    if len(value) > MAX_BIASES:
        raise wrong("logit_bias", f"an object of at most {MAX_BIASES} tokens", f"{len(value)} tokens")
    biases = Fields(value, "logit_bias.")
    for key in value:
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10):
            raise wrong("logit_bias", expected, key)
    return {int(key): biases.number(key, 0.0, low=-100, high=100) for key in value}


def _schema(value: Any) -> Any:
    """Return the JSON schema of a response_format; None for text."""
    if value is None:
        return None
    form = Fields(value, "response_format.")
    kind = form.text("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise wrong("response_format.type", "'text', 'json_object' or 'json_schema'", kind)
    if kind != "json_schema":
        form.finish()
        return ANY_OBJECT if kind == "json_object" else None
    named = Fields(form.get("json_schema"), "response_format.json_schema.")
    named.text("name")
    named.text("description")
    named.boolean("strict")  # every schema is enforced
    schema = named.get("schema")
    named.finish()
    form.finish()
    return ANY_OBJECT if schema is None else schema


def _include_usage(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not stream:
        raise wrong("stream_options", "absent unless 'stream' is true", value)
    options = Fields(value, "stream_options.")
    include = options.boolean("include_usage")
    options.neutral("continuous_usage_stats", False)
    options.finish(["include_obfuscation"])
    return include


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise wrong("stop", f"a non-empty string or a list of up to {MAX_STOPS}", value)
    return tuple(stops)


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """Return the prompts from a string, ids, or a list of either."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if is_ids(value):
            return (tuple(value),)
        if len(value) > MAX_CHOICES:
            raise wrong("prompt", f"a list of at most {MAX_CHOICES} prompts", f"{len(value)} prompts")
        if all(isinstance(p, str) for p in value):
            return tuple(value)
        if all(isinstance(p, list) and p and is_ids(p) for p in value):
            return tuple(tuple(p) for p in value)
    raise wrong("prompt", "a string, a list of token ids, or a list of these", value)


def is_ids(value: list[Any]) -> bool:
    """True for a list of integers."""
    return all(isinstance(t, int) and not isinstance(t, bool) for t in value)


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise wrong("messages", "a list of at least one message", value)
    return tuple(_message(m, f"messages[{i}]") for i, m in enumerate(value))


def _message(value: Any, where: str) -> Message:
    fields = Fields(value, f"{where}.")
    role = fields.text("role")
    if role not in _ROLES:
        raise wrong(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    message = {"role": _ROLES[role], "content": _content(fields.get("content"), f"{where}.content")}
    name = fields.text("name")
    if name is not None:
        message["name"] = name
    # Fields of our own answers that clients send back; they have no effect if empty.
    for empty in ("tool_calls", "annotations"):
        fields.neutral(empty, [])
    for empty in ("function_call", "tool_call_id", "refusal", "audio"):
        fields.neutral(empty)
    fields.finish()
    return message


def _content(value: Any, where: str) -> str:
    """Return the text, or the concatenation of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise wrong(where, "a string or a list of text parts", value)
    texts = []
    for i, item in enumerate(value):
        part = Fields(item, f"{where}[{i}].")
        if part.text("type") != "text":
            raise wrong(f"{where}[{i}].type", "'text' (this model supports no other type)", part.get("type"))
        text = part.text("text")
        if text is None:
            raise wrong(f"{where}[{i}].text", "a string", None)
        part.finish()
        texts.append(text)
    return "".join(texts)
