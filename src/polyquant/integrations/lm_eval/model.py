"""The harness's model class: log-likelihoods, rolling log-likelihoods, generation and chat templates.

Requests are sorted by their tokens, so that each reuses its common prefix with the previous one: answers to one
question, or questions after the same examples, process their common prefix once. Log-likelihoods run one at a time on
one session, since a prompt already uses all cores; answers are generated `batch_size` at a time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, cast

import numpy as np

from polyquant.errors import InputError, UnsupportedError
from polyquant.runtime.batch import Batch, Job, default_parallel
from polyquant.runtime.chat import render_chat, template_of
from polyquant.runtime.generate import Generation, generate
from polyquant.runtime.kv_cache import CacheType
from polyquant.runtime.load import Activations, load
from polyquant.runtime.memory import default_memory
from polyquant.runtime.sampling import Sampling
from polyquant.runtime.scoring import log_sum_exp, pieces

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as absent:
    raise UnsupportedError(
        f"the harness cannot be imported: {absent}", hint="pip install 'polyquant[lm-eval]'"
    ) from absent

__all__ = ["PolyquantLM"]

_log = logging.getLogger("lm_eval")
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks use for the maximum length of an answer; the first one present counts, as in the harness."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


@register_model("polyquant")
class PolyquantLM(TemplateLM):
    """--model_args pretrained=PATH and any of: activations, cache, max_length, max_gen_toks, prefix_token_id,
    add_bos_token. --batch_size: answers generated at once; auto: four per thread.

    max_length: tokens per window (default: the model's context). max_gen_toks: maximum tokens of an answer if the task
    has no limit. prefix_token_id: the first token of an input without context (default: BOS, else EOS). add_bos_token:
    whether to add BOS (default: the tokenizer's setting).
    """

    def __init__(
        self,
        pretrained: str,
        activations: Activations = "int8",
        cache: CacheType | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        add_bos_token: bool | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        """device: ignored, since the harness always passes one ("cuda:0" by default); we run on the CPU."""
        super().__init__()
        self._parallel = _answers_at_once(batch_size, max_batch_size)
        self.model = load(pretrained, activations=activations, cache=cache, context=max_length)
        self.tokens = self.model.tokenizer
        self.max_length, self.max_gen_toks = self.model.context, max_gen_toks
        self.batch_size = self._parallel
        self._prefix, self._add_bos = prefix_token_id, add_bos_token
        self._session = self.model.session()
        self._template: str | None = None
        self._unknown: set[str] = set()

    # ------------------------------------------------------------ text <-> tokens

    @property
    def eot_token_id(self) -> int:
        """The token that ends generation. Raises UnsupportedError if the tokenizer has none."""
        for kind in ("eos", "eot"):
            if kind in self.tokens.special:
                return self.tokens.special[kind]
        raise UnsupportedError("the tokenizer has no end token", file=self.tokens.file)

    @property
    def prefix_token_id(self) -> int:
        """The first token of an input without context."""
        if self._prefix is not None:
            return self._prefix
        bos = self.tokens.special.get("bos")
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Part of the key of the harness's request cache."""
        return str(self.tokens.file).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a string.

        None: BOS as the tokenizer specifies, but not if the string starts with it (chat templates).
        """
        add = self._add_bos if add_special_tokens is None else add_special_tokens
        bos = self.tokens.text_of("bos")
        if add_special_tokens is None and bos and string.startswith(bos):
            add = False
        if add and self._add_bos and bos is not None:
            return [self.tokens.special["bos"], *self.tokens.encode(string, add_special=False)]
        return self.tokens.encode(string, add_special=add is not False)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template, for the log; None if chat templates are off.

        Raises UnsupportedError if it does not exist.
        """
        self._template = chat_template if isinstance(chat_template, str) else None
        return template_of(self.tokens, self._template) if chat_template else None

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Return the prompt for a conversation; without add_generation_prompt it ends within the last message, to be
        continued."""
        text = render_chat(
            self.tokens,
            chat_history,
            name=self._template,
            add_generation_prompt=add_generation_prompt,
        )
        if add_generation_prompt:
            return text
        last = str(chat_history[-1]["content"]).strip()
        at = text.rfind(last)
        if at < 0:
            raise UnsupportedError(
                "the chat template changes the last message, so it cannot be continued", file=self.tokens.file
            )
        return text[: at + len(last)]

    # ------------------------------------------------------------ the harness's interface

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Return (log p of the continuation, whether it is greedy) for each (strings, context ids, continuation
        ids)."""
        scores: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(requests)), key=lambda i: requests[i][1] + requests[i][2])
        for i in tqdm(order, disable=disable_tqdm, desc="Running loglikelihood requests"):
            texts, context, continuation = requests[i]
            scores[i] = self._score(context, continuation)
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, scores[i])
        return [scores[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the sum of log p over all tokens of each string; longer ones are split as the harness documents."""
        out = []
        for request in tqdm(requests, disable=disable_tqdm, desc="Running loglikelihood_rolling requests"):
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            out.append(sum(self._score(*make_disjoint_window(window))[0] for window in windows))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), out[-1])
        return out

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each prompt, up to a stop string or the maximum length."""
        answers = [""] * len(requests)
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        order = sorted(range(len(requests)), key=prompts.__getitem__)
        memory = default_memory(self.model.checkpoint.nbytes)
        batch = Batch(self.model.decoder, self.model.context, parallel=self._parallel, memory=memory)
        waiting, jobs = deque(order), dict[int, Job]()
        with tqdm(total=len(order), disable=disable_tqdm, desc="Running generate_until requests") as progress:
            while waiting or jobs:
                while waiting and len(jobs) < 2 * self._parallel:  # each has a session
                    i = waiting.popleft()
                    jobs[i] = batch.submit(self._generation(prompts[i], requests[i].args[1]))
                batch.advance()
                for i, job in list(jobs.items()):
                    answers[i] += _new_text(job)
                    if job.ended:
                        del jobs[i]
                        self.cache_hook.add_partial("generate_until", requests[i].args, answers[i])
                        progress.update()
        return answers

    # ------------------------------------------------------------ implementation

    def _score(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        if not 1 <= len(continuation) <= self.max_length:
            raise InputError(
                "a continuation does not fit the window",
                expected=f"1 to {self.max_length} tokens",
                found=len(continuation),
            )
        tokens = [*context, *continuation][-(self.max_length + 1) :]
        first = len(tokens) - len(continuation)  # index of the first scored token
        if first < 1:
            raise InputError("a continuation without context cannot be scored", expected="at least one token before it")
        fed, targets = tokens[:-1], np.array(tokens[first:])
        self._go_to(fed[: first - 1])
        total, greedy = 0.0, True
        for piece in pieces(len(targets), self.model.vocab):
            logits = self._session.feed_all(fed[first - 1 :][piece])
            rows = np.arange(len(logits))
            total += float((logits[rows, targets[piece]] - log_sum_exp(logits)).sum())
            greedy = greedy and bool((logits.argmax(-1) == targets[piece]).all())
        return total, greedy

    def _go_to(self, tokens: Sequence[int]) -> None:
        """Rewind or feed the session to exactly these tokens; its common prefix is reused."""
        pairs = zip(self._session.tokens, tokens, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._session.rewind(shared)
        if shared < len(tokens):
            self._session.feed(tokens[shared:])

    def _generation(self, prompt: Sequence[int], task_options: Mapping[str, Any]) -> Generation:
        options = dict(task_options)
        until = options.pop("until", None) or []
        lengths = [options.pop(name, None) for name in _LENGTHS]
        most = int(next((n for n in lengths if n is not None), self.max_gen_toks))
        if not 0 < most < self.max_length:
            raise InputError(
                "the answer leaves no room for a prompt",
                expected=f"max_gen_toks from 1 to {self.max_length - 1}",
                found=most,
            )
        sampled = options.pop("do_sample", None)
        sampling = {k: options.pop(k) for k in _SAMPLING if options.get(k) is not None}
        if sampled is False:
            sampling["temperature"] = 0.0
        elif sampled:
            sampling.setdefault("temperature", 1.0)
        self._warn(options)
        stops = [until] if isinstance(until, str) else cast("Iterable[str]", until)
        return generate(
            self.model,
            list(prompt)[-(self.max_length - most) :],
            max_tokens=most,
            stop=[s for s in stops if s],
            sampling=Sampling(**sampling),
        )

    def _warn(self, options: Iterable[str]) -> None:
        """Warn once per option of the task that has no effect."""
        for name in set(options) - self._unknown:
            self._unknown.add(name)
            _log.warning("polyquant ignores the unknown generation option '%s'", name)


def _answers_at_once(batch_size: int | str | None, limit: int | None) -> int:
    """Return the number for --batch_size and --max_batch_size. Raises InputError for other values."""
    word = str(1 if batch_size is None else batch_size)
    if word == "auto" or word.startswith("auto:"):
        return min(default_parallel(), limit or default_parallel())
    if not word.isdecimal() or not 1 <= int(word) <= 1024:
        raise InputError("batch_size is out of range", expected="1 to 1024, or auto", found=batch_size)
    return int(word)


def _new_text(job: Job) -> str:
    """Return the text since the last call. Raises the error that ended the job."""
    if job.problem is not None:
        raise job.problem
    return "".join(token.text for token in job.taken())
