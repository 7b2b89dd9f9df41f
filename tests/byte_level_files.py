"""Small byte-level BPEs, trained when they are requested."""

from __future__ import annotations

from typing import Any

from golden import VECTORS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    (VECTORS / "models/README.md").read_text(),
    "I've been told he's there, 'RE you sure? We'Ve 1234567 3.14159 things\n\n\tand   spaces",
    "Größe naïve façade 北京 东京 Київ हिन्दी 🙂🚀 ﬁ × ½",
] * 4


def byte_level(
    pre: Any, *, specials: tuple[str, ...] = ("<|begin_of_text|>", "<|end_of_text|>"), **options: Any
) -> Tokenizer:
    made = Tokenizer(models.BPE(**options))
    made.pre_tokenizer = pre
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=list(specials), initial_alphabet=alphabet)
    )
    return made
