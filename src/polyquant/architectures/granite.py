"""Granite 3: Llama with four factors: of the embedding, of what each part adds, of the scores of attention, and a divisor of the logits.

Source: modeling_granite.py of transformers; llama.cpp's converter.
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.keys import granite_keys
from polyquant.architectures.llama import LLAMA
from polyquant.architectures.parts import ConvertedOnly

__all__ = ["GRANITE"]

GRANITE = replace(
    LLAMA,
    name="granite",
    model_type="granite",
    class_name="GraniteForCausalLM",
    reads=("granite",),
    hyper=LLAMA.hyper.plus(*granite_keys()),
    layer=ConvertedOnly(),
)
