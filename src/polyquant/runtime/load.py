"""Load a checkpoint as a Model."""

from __future__ import annotations

import os
from typing import Any, Literal

import numpy as np

from polyquant.architectures import layer_numbers
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.language_model import language_model
from polyquant.architectures.record import Architecture
from polyquant.architectures.rope import FREQS
from polyquant.codecs.tl import Tile
from polyquant.errors import InputError, UnsupportedError
from polyquant.opening import detect, open_sound
from polyquant.ops import native
from polyquant.runtime import identity
from polyquant.runtime.c8 import C8, read_c8
from polyquant.runtime.decoder import Decoder
from polyquant.runtime.derived import derived_maps
from polyquant.runtime.embedding_model import EncoderModel
from polyquant.runtime.encoder import Encoder
from polyquant.runtime.ends import Embedding, Head, LayerInputs, embedding_scale, logit_scale, row_lengths
from polyquant.runtime.kv_cache import CacheType
from polyquant.runtime.layer import computes
from polyquant.runtime.model import Model
from polyquant.runtime.norm import bare_norm, read_norm
from polyquant.runtime.rotary import Rotary, rotaries
from polyquant.runtime.site import Site
from polyquant.runtime.tensors import Tensors
from polyquant.types import F32, Checkpoint, Floats, Rounding

__all__ = ["Activations", "assemble", "load"]

Activations = Literal["int8", "float"]
_MAX_THREADS = 256


def load(
    path: str | os.PathLike[str],
    *,
    activations: Activations = "int8",
    cache: CacheType | None = None,
    threads: int | None = None,
    context: int | None = None,
    ternary_layout: str | None = None,
    dialect: str | None = None,
    tile: Tile | None = None,
) -> Model:
    """Open a checkpoint to run it. Weights stay packed in their file; only norms and biases are read.

    activations: "int8" rounds the inputs of quantized weights (per block of 32, or per token for BitNet), as fast
    kernels do; "float" does not.
    cache: storage of keys and values, "f32", "f16" or "int8" per channel; by default "f16" if activations are rounded,
    else "f32" for exact arithmetic.
    threads: of the native kernels, in the whole process; by default one per processor.
    context: maximum number of tokens, at most that of the model.
    ternary_layout, dialect, tile: properties that a GGUF file of BitNet weights does not specify, see open_checkpoint.

    An encoder (BERT, ...) only produces embeddings: EncoderModel. BitNet master weights are made ternary in memory. The
    notes of the checkpoint report this, and name tensors that the decoder does not use.
    Raises InputError, UnsupportedError.
    """
    _one_of("activations", activations, ("int8", "float"))
    _one_of("cache", cache, (None, "f32", "f16", "int8", "c8"))
    if threads is not None and not 1 <= threads <= _MAX_THREADS:
        raise InputError("threads is out of range", expected=f"1 to {_MAX_THREADS}", found=threads)
    options = {"ternary_layout": ternary_layout, "dialect": dialect, "tile": tile}
    checkpoint = language_model(open_sound(detect(path)[0], path, options))
    if threads is not None:
        native.set_threads(threads)
    return assemble(checkpoint, activations=activations, cache=cache, context=context)


def assemble(
    checkpoint: Checkpoint,
    *,
    activations: Activations = "int8",
    cache: CacheType | None = None,
    context: int | None = None,
) -> Model:
    """Build the model of an open checkpoint; see `load`. Raises InputError, UnsupportedError."""
    architecture = identity.architecture(checkpoint)
    if not architecture.runs:
        raise UnsupportedError(
            f"architecture '{architecture.name}' can be converted but not run",
            file=checkpoint.path,
            hint="see `polyquant architectures`",
        )
    names = identity.names(checkpoint, architecture)
    hyper = identity.hyper_parameters(checkpoint, architecture, names)
    if context is not None and not 1 <= context <= hyper.context:
        raise InputError(
            "context is out of range", file=checkpoint.path, expected=f"1 to {hyper.context} tokens", found=context
        )
    token = identity.rounds_tokens(checkpoint, architecture)
    rounding: Rounding = "none" if activations == "float" else "token" if token else "block"
    tensors = Tensors(
        checkpoint,
        names,
        architecture,
        rounding,
        masters=token and checkpoint.naming == "hf" and not checkpoint.describes_itself,
        derived=derived_maps(checkpoint, architecture, hyper),
        numbers=layer_numbers.lists(checkpoint, architecture, hyper.layers),
    )
    if architecture.encoder:
        if cache is not None:
            raise InputError("an encoder has no key/value cache", file=checkpoint.path, hint="omit the cache option")
        encoder = build_encoder(tensors, architecture, hyper)
        return EncoderModel(tensors.noted(), architecture, encoder, context=context)
    exact = activations == "float" or all(w.codec.form is Floats for w in checkpoint.values())
    decoder = build(tensors, architecture, hyper, cache, exact=exact)
    return Model(tensors.noted(), architecture, decoder, context=context)


def _one_of(what: str, value: object, known: tuple[str | None, ...]) -> None:
    if value not in known:
        raise InputError(f"unknown {what}", expected=" or ".join(k for k in known if k), found=value)


def build(
    tensors: Tensors, architecture: Architecture, hyper: Hyper, cache: CacheType | None = None, *, exact: bool = True
) -> Decoder:
    """Build the decoder.

    Raises InputError for missing or misshapen tensors, and for a cache type that the checkpoint does not have.
    """
    c8 = _c8(tensors, hyper, cache, exact=exact)
    layers = _layers(tensors, architecture, hyper, c8 if c8 is not None and not c8.after_rope else None)
    ends, head, kind = architecture.ends, "token_embd" if hyper.tied else "output", architecture.norm
    bare = bare_norm(hyper.hidden, hyper.norm_eps, kind)
    last = bare if ends.bare else read_norm(tensors, ends.last_stem, hyper.hidden, hyper.norm_eps, ["output"], kind)
    linear = tensors.linear(hyper.hidden, [(head, hyper.vocab)])
    lengths = row_lengths(linear.weights[0]) if hyper.vocab == ends.unit_rows else None
    return Decoder(
        hyper,
        _embedding(tensors, architecture, hyper),
        layers,
        last,
        linear,
        _rotaries(tensors, architecture, hyper),
        "c8" if c8 is not None and c8.after_rope else cache if cache not in (None, "c8") else "f32" if exact else "f16",
        c8.grids if c8 is not None else None,
        Head(logit_scale(ends, hyper), hyper.real("logit_softcap", 0.0), lengths),
        _layer_inputs(tensors, architecture, hyper),
    )


def build_encoder(tensors: Tensors, architecture: Architecture, hyper: Hyper) -> Encoder:
    """Build the encoder. Raises InputError for missing or misshapen tensors."""
    kind, ends = architecture.norm, architecture.ends
    return Encoder(
        hyper,
        _embedding(tensors, architecture, hyper),
        _layers(tensors, architecture, hyper, None),
        read_norm(tensors, ends.last_stem, hyper.hidden, hyper.norm_eps, kind=kind) if ends.last else None,
        _rotaries(tensors, architecture, hyper),
    )


def _layers(tensors: Tensors, architecture: Architecture, hyper: Hyper, c8: C8 | None) -> list[Any]:
    """Build the layers. c8: grids for rounding keys and values before the cache."""
    if hyper.layers > len(tensors.names):  # before allocating a list of that length
        raise InputError(
            "more layers than tensors",
            file=tensors.checkpoint.path,
            expected=f"at most {len(tensors.names)}",
            found=hyper.layers,
        )
    layer_class = computes(architecture.layer)
    return [layer_class(architecture.layer, Site(tensors, architecture, hyper, i, c8)) for i in range(hyper.layers)]


def _rotaries(tensors: Tensors, architecture: Architecture, hyper: Hyper) -> tuple[Rotary, ...]:
    interleaved = architecture.rotates_pairs(gguf=tensors.checkpoint.naming == "gguf")
    divisors = tensors.vector(FREQS, hyper.rotary_size // 2) if FREQS in tensors else None
    return rotaries(hyper, interleaved=interleaved, divisors=divisors, file=tensors.checkpoint.path)


def _embedding(tensors: Tensors, architecture: Architecture, hyper: Hyper) -> Embedding:
    ends, size = architecture.ends, hyper.hidden
    return Embedding(
        tensors.weight("token_embd.weight", (hyper.vocab, size)),
        embedding_scale(ends, hyper),
        tensors.weight("position_embd.weight", (hyper.context, size)).dequantize() if ends.positions else None,
        read_norm(tensors, "token_embd_norm", size, hyper.norm_eps, kind=architecture.norm) if ends.norm else None,
        _first_type(tensors, hyper) if ends.types else None,
    )


def _layer_inputs(tensors: Tensors, architecture: Architecture, hyper: Hyper) -> LayerInputs | None:
    """Return the per-layer embeddings, None for models without them."""
    size = hyper.count("per_layer_input") if architecture.ends.layer_inputs else 0
    if not size:
        return None
    width = hyper.layers * size
    return LayerInputs(
        tensors.weight("per_layer_token_embd.weight", (hyper.vocab, width)),
        tensors.linear(hyper.hidden, [("per_layer_model_proj", width)]),
        read_norm(tensors, "per_layer_proj_norm", size, hyper.norm_eps),
    )


def _first_type(tensors: Tensors, hyper: Hyper) -> F32 | None:
    """Return the first token type embedding [hidden]; None for a model without token types."""
    kinds = hyper.count("token_types")
    if not kinds or (tensors.checkpoint.naming == "gguf" and "token_types.weight" not in tensors):
        return None
    return np.asarray(tensors.weight("token_types.weight", (kinds, hyper.hidden)).dequantize()[0], np.float32)


def _c8(tensors: Tensors, hyper: Hyper, cache: CacheType | None, *, exact: bool) -> C8 | None:
    """Return the checkpoint's C8 grids, unless another cache type is requested."""
    if cache not in (None, "c8"):
        return None
    checkpoint = tensors.checkpoint
    after_rope = checkpoint.dialect is not None and checkpoint.dialect.name == "v1"
    c8 = read_c8(tensors, hyper, after_rope=after_rope)
    if c8 is None and cache == "c8":
        raise InputError(
            "the checkpoint has no scales for a C8 cache", file=checkpoint.path, hint="choose another cache: f16, int8"
        )
    return c8 if cache == "c8" or not exact else None
