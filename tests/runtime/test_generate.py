"""Prompts to tokens on the embedded models: transformers' tokens from every engine and format, correct stops."""

from __future__ import annotations

import numpy as np
import pytest

import polyquant
from golden import VECTORS
from polyquant.analysis.demo import demo_model
from polyquant.errors import InputError, UnsupportedError
from polyquant.ops import native
from polyquant.runtime.generate import generate
from polyquant.runtime.sampling import Sampling

PROMPT = "And it came to pass"
IDS = (0, 298, 356, 474, 292, 603)
GREEDY = [
    14, 438, 261, 404, 372, 489, 292, 261, 412, 14, 299, 261, 412, 271, 701, 372, 489, 292, 261, 412, 14, 270, 311,
    1549, 289, 261, 472,
    271, 261, 412, 271, 701, 14, 270, 311, 1549, 289, 261, 472, 271, 261, 412, 271, 701, 16, 201, 298, 261,
]  # fmt: skip
TEXT = (
    ", when the man was come to the king, that the king of Judah was come to the king, and he reigned in the house of "
    "the king of Judah, "
    "and he reigned in the house of the king of Judah.\nAnd the"
)
PENALIZED = [
    14,
    438,
    261,
    404,
    372,
    489,
    292,
    334,
    14,
    299,
    311,
    477,
    542,
    262,
    585,
    1511,
    271,
    261,
    466,
    14,
    270,
    391,
    322,
    339,
]
"""transformers 5.23, float32, generate(do_sample=False, max_new_tokens=48) on the embedded llama.

PENALIZED: with repetition_penalty=1.3.
"""


@pytest.fixture(scope="module")
def llama():
    return polyquant.load(demo_model("llama"))


def ids(answer):
    return [t.id for t in answer]


def test_greedy_tokens_equal_transformers(llama, engine):
    answer = llama.generate(PROMPT, max_tokens=48)
    tokens = list(answer)
    assert answer.prompt == IDS and [t.id for t in tokens] == GREEDY
    assert "".join(t.text for t in tokens) == TEXT == llama.tokenizer.decode(GREEDY)
    assert (answer.finish, answer.prompt_tokens, answer.generated) == ("length", 6, 48)
    assert answer.rate > 0 and answer.prompt_rate > 0
    exact = llama.logits([*IDS, GREEDY[0]])
    assert abs(tokens[0].logprob - (exact[5, GREEDY[0]] - np.logaddexp.reduce(exact[5]))) < 1e-4


def test_a_penalty_over_all_tokens_equals_transformers(llama):
    assert ids(llama.generate(PROMPT, max_tokens=24, repetition_penalty=1.3, repetition_window=1000)) == PENALIZED


@pytest.mark.parametrize("model", ["llama", "bitnet"])
def test_a_folder_and_its_conversion_give_the_same_tokens(model, demo_files, engine):
    # The greedy choice of bitnet depends on the rounding of activations: i2_s has the same codes and scales.
    other = demo_files(model, "bf16" if model == "llama" else "i2_s.x86")
    options = {"activations": "float"} if model == "bitnet" else {}
    answers = [
        ids(polyquant.load(path, **options).generate(PROMPT, max_tokens=24)) for path in (demo_model(model), other)
    ]
    assert answers[0] == answers[1] and len(answers[0]) == 24


# bitnet with rounded activations is left out: an activation next to a rounding boundary moves its logits by 0.05
# (demo/README.md).
@pytest.mark.parametrize(
    ("model", "codec", "activations"),
    [("llama", "q4_k", "int8"), ("llama", "q8_0", "int8"), ("bitnet", "tq2_0", "float")],
)
def test_native_and_numpy_engines_give_the_same_tokens(model, codec, activations, demo_files):
    answers = []
    for which in ("native", "numpy"):
        if which == "native" and native.lib() is None:
            pytest.skip("native kernels are not built or switched off")
        with native.engine(which):
            found = polyquant.load(demo_files(model, codec), activations=activations)
            answers.append(ids(found.generate(PROMPT, max_tokens=20)))
    assert answers[0] == answers[1] and len(set(answers[0])) > 5


@pytest.mark.parametrize("name",
    ["tiny-llama-tied/tiny-llama-tied-Q4_0.gguf", "tiny-llama-untied/tiny-llama-untied-Q4_K_M.gguf",
                                  "tiny-bitnet/tiny-bitnet-TQ2_0.gguf"])  # fmt: skip
@pytest.mark.parametrize(("activations", "bound"), [("float", 1e-4), ("int8", 0.1)])
def test_the_vector_models_generate(name, activations, bound):
    """Logits of many tokens at once equal those of single tokens; int8 may round inputs at a boundary differently."""
    model = polyquant.load(VECTORS / "models" / name, activations=activations)
    tokens = list(model.generate("hello", max_tokens=8, temperature=1.0, seed=3))
    logits = model.logits([*model.tokenizer.encode("hello"), *(t.id for t in tokens[:-1])])[-len(tokens) :]
    for row, token in zip(logits, tokens, strict=True):
        assert abs(token.logprob - (row[token.id] - np.logaddexp.reduce(row))) < bound


def test_a_seed_without_sampling_warns(llama):
    with pytest.warns(UserWarning, match="seed has no effect at temperature 0"):
        llama.generate(PROMPT, max_tokens=1, seed=1)


def test_seeds(llama):
    options = {"max_tokens": 30, "temperature": 1.0, "top_k": 40}
    first, again, other = (ids(llama.generate(PROMPT, seed=seed, **options)) for seed in (1, 1, 2))
    assert first == again != other


# ---------------------------------------------------------------- ends


def text_of(answer):
    return "".join(t.text for t in answer)


@pytest.mark.parametrize(
    ("stop", "left"),
    [
        ("king", ", when the man was come to the "),
        (["zebra", " of Jud"], ", when the man was come to the king, that the king"),
        ("e king, tha", ", when the man was come to th"),  # over five tokens
        (["king", "the king"], ", when the man was come to "),  # which begins first
        (["the king, and", "me to"], ", when the man was co"),
        (",", ""),
        ("\n", TEXT[: TEXT.index("\n")]),
    ],
)
def test_stop_strings(stop, left, llama):
    answer = llama.generate(PROMPT, max_tokens=48, stop=stop)
    pieces = [t.text for t in answer]
    assert "".join(pieces) == left and answer.finish == "stop"
    assert answer.generated == len(pieces) <= 48


def test_a_partial_stop_string_is_held_back_and_released(llama):
    answer = llama.generate(PROMPT, max_tokens=8, stop=", when the man was come to the king, that the queen")
    pieces = [t.text for t in answer]
    assert pieces[:7] == [""] * 7 and pieces[7] == ", when the man was come to the" and answer.finish == "length"
    answer = llama.generate(PROMPT, max_tokens=20, stop=["the king, and", "king of Judah, but"])
    assert text_of(answer) == llama.tokenizer.decode(GREEDY[:20]) and answer.finish == "length"


def test_an_end_token_ends_the_text(llama, monkeypatch):
    monkeypatch.setattr(llama.tokenizer, "ends", frozenset({438, 201}))
    answer = llama.generate(PROMPT, max_tokens=48, stop="; never")
    tokens = list(answer)
    assert [t.id for t in tokens] == GREEDY[:2] and text_of(tokens) == "," and answer.finish == "stop"
    assert list(answer) == []


def test_the_context_ends_the_text(llama):
    small = polyquant.load(demo_model("llama"), context=10)
    assert small.context == 10
    answer = small.generate(PROMPT, max_tokens=None)
    assert ids(answer) == GREEDY[:5] and answer.finish == "length"  # the fifth is not added to the cache
    whole = small.generate(list(range(3, 13)), max_tokens=4)
    assert len(ids(whole)) == 1 and whole.finish == "length"


def test_a_partial_character_at_the_end_is_emitted(llama, monkeypatch):
    first, second = (
        llama.tokenizer.encode("é", add_special=False)[:1],
        llama.tokenizer.encode("🙂", add_special=False)[:1],
    )
    stream = iter([*first, *second])
    monkeypatch.setattr("polyquant.runtime.sampling.Sampler.pick", lambda self, logits, history: next(stream))
    tokens = list(llama.generate(PROMPT, max_tokens=2))
    assert [t.id for t in tokens] == [*first, *second] and text_of(tokens).endswith("\ufffd")


# ---------------------------------------------------------------- sessions and ids


def test_a_session_continues_without_recomputing_its_prefix(llama):
    session = llama.session()
    first = llama.generate(PROMPT, max_tokens=10, session=session)
    said = ids(first)
    assert first.reused == 0 and session.tokens == [*IDS, *said[:-1]]
    longer = [*IDS, *said, 14, 270]
    second = llama.generate(longer, max_tokens=10, session=session)
    assert ids(second) == ids(llama.generate(longer, max_tokens=10))
    assert second.reused == len(IDS) + 9
    same = llama.generate(PROMPT, max_tokens=10, session=session)
    assert ids(same) == said and same.reused == len(IDS) - 1
    assert len(session.tokens) == session.position


def test_ids_need_no_tokenizer(llama, monkeypatch):
    bare = polyquant.load(demo_model("llama"))

    def none(checkpoint):
        raise UnsupportedError("no tokenizer")

    monkeypatch.setattr("polyquant.runtime.model.open_tokenizer", none)
    tokens = list(bare.generate(np.array(IDS), max_tokens=5))
    assert [t.id for t in tokens] == GREEDY[:5] and text_of(tokens) == ""
    for call in (lambda: bare.generate(PROMPT), lambda: bare.generate(IDS, stop="x")):
        with pytest.raises(UnsupportedError, match="no tokenizer"):
            call()


# ---------------------------------------------------------------- options that are refused before any work

WRONG = {
    "empty ids": ([], {}, "the prompt is empty"),
    "no ids": ([[1], [2]], {}, "the prompt is empty"),
    "outside": ([1, 2048], {}, "expected 0 to 2047, found 2048"),
    "negative": ([1, -3], {}, "found -3"),
    "too many ids": ([5] * 513, {}, "expected at most 512 tokens, found 513 tokens"),
    "too long": ("word " * 600, {}, "expected at most 512 tokens, found "),
    "far too long": ("x" * 10_000_000, {}, "found a prompt of 10000000 characters"),
    "no tokens": ("x", {"max_tokens": 0}, "max_tokens is out of range"),
    "half a token": ("x", {"max_tokens": 1.5}, "max_tokens is out of range"),
    "empty stop": ("x", {"stop": [""]}, "stop strings"),
    "stop of numbers": ("x", {"stop": [1]}, "stop strings"),
    "top_p": ("x", {"top_p": 3}, "top_p is out of range"),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_options_are_refused_before_any_work(case, llama, monkeypatch):
    prompt, options, said = WRONG[case]
    monkeypatch.setattr("polyquant.runtime.model.Session.feed", None)
    with pytest.raises(InputError) as caught:
        llama.generate(prompt, **options)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("context", [0, -1, 513])
def test_a_context_longer_than_the_models(context):
    with pytest.raises(InputError, match="context is out of range"):
        polyquant.load(demo_model("llama"), context=context)


def test_thread_count_is_global_and_does_not_change_tokens(engine):
    before = native.threads()
    try:
        for threads in (1, 3):
            model = polyquant.load(demo_model("llama"), threads=threads)
            assert engine == "numpy" or native.threads() == threads
            assert ids(model.generate(PROMPT, max_tokens=6)) == GREEDY[:6]
    finally:
        native.set_threads(before)
    for threads in (0, -1, 1000):
        with pytest.raises(InputError, match="threads is out of range"):
            polyquant.load(demo_model("llama"), threads=threads)


def test_sampling_is_off_by_default(llama):
    assert ids(generate(llama, PROMPT, max_tokens=3)) == GREEDY[:3]


def test_the_most_likely_tokens_are_reported():
    answer = generate(polyquant.load(demo_model("llama")), "In the", max_tokens=4, top=3)
    for token in answer:
        (first, logprob), *_ = token.top
        assert (first, round(logprob, 4)) == (token.id, round(token.logprob, 4)) and len(token.top) == 3


def test_a_bias_outside_the_vocabulary_is_an_error():
    model = polyquant.load(demo_model("llama"))
    with pytest.raises(InputError, match="outside the vocabulary"):
        generate(model, "In the", sampling=Sampling(logit_bias={model.vocab: 1.0}))
