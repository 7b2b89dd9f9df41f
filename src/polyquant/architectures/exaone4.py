"""EXAONE 4: norms after attention and feed-forward instead of before them, and QK norms.

Large models have a sliding window in three layers of four; their fourth layers do not rotate.

h = x + norm(O attention(rope(norm(Q x)), rope(norm(K x)), V x));  y = h + norm(D (silu(G h) * U h))

Source: modeling_exaone4.py of transformers; llama.cpp's converter.
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.keys import sliding_layers_key, sliding_window
from polyquant.architectures.olmo2 import OLMO2
from polyquant.architectures.parts import Attention, FeedForward, Layer
from polyquant.architectures.windows import all_but_every, listed_types, listed_windows, where_listed

__all__ = ["EXAONE4"]

_PERIOD = 4
_WINDOW = replace(sliding_window(), read=lambda config: config.get("sliding_window", 4096) or 0)

EXAONE4 = replace(
    OLMO2,
    name="exaone4",
    model_type="exaone4",
    class_name="Exaone4ForCausalLM",
    reads=("exaone4",),
    hyper=replace(
        USUAL.changed(norm_eps={"default": 1e-5}, vocab={"write": "always"}).plus(_WINDOW, sliding_layers_key(_PERIOD)),
        tied=False,
        windows=where_listed(all_but_every(_PERIOD)),
        gguf_windows=listed_windows,
        more_config=listed_types,
    ),
    layer=Layer(
        Attention(norm="", head_norms=True, post_norm=True, rope="windowed"), FeedForward(norm="", post_norm=True)
    ),
    biases=(),
)
