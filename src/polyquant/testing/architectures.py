"""Contract checks of architecture records: `check_record` for the tables, `check_model` for a tiny random model.

A package that adds a record calls both in its own tests, with the record and an empty folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from polyquant import registry
from polyquant.analysis.validate import validate
from polyquant.architectures.find import by_name, of_config, of_metadata
from polyquant.architectures.hyper import Hyper, Value
from polyquant.architectures.hyper_table import Key
from polyquant.architectures.record import Architecture
from polyquant.architectures.tensors import hf_maps
from polyquant.calibration.stages import calibration_stages
from polyquant.conversion.convert import convert
from polyquant.opening import open_checkpoint
from polyquant.runtime.load import load
from polyquant.runtime.model import Model
from polyquant.types import F32, Checkpoint, Severity, Shape, Weight

__all__ = [
    "check_found",
    "check_hyper",
    "check_model",
    "check_names",
    "check_record",
    "check_wiring",
    "tiny_hyper",
    "tiny_model",
]

_STEP = 1 / 8  # of ternary weights without zeros: exactly their mean absolute value
_SAMPLES: dict[str, Value] = {
    "experts": 4, "experts_used": 2, "expert_feed_forward": 32, "shared_feed_forward": 32, "expert_latent": 16,
    "window": 5, "rope_theta_swa": 5000.0,
    "layer_kv_heads": (0, 2, 0), "layer_feed_forward": (32, 0, 0), "recurrent": (1, 0, 0), "sliding": (1, 0, 0),
    "ssm_conv": 4, "ssm_inner": 128, "ssm_state": 16, "ssm_heads": 8, "ssm_groups": 2,
}  # fmt: skip
"""Hyper-parameters of tiny models whose defaults would omit a part."""
_FIELDS = frozenset(f.name for f in fields(Hyper))
_DECAY = "ssm_a"
"""The layer tensor that is negative, and stored as its logarithm in Hugging Face folders."""
_TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def check_record(record: Architecture) -> None:
    """Check the tables of a record."""
    check_names(record)
    check_wiring(record)
    check_hyper(record)
    check_found(record)


def check_names(record: Architecture) -> None:
    """Check that every tensor has a name in both schemes, and that translation round-trips."""
    names, prefix = record.names, record.names.prefix
    moved = {target for move in record.moves for target in move.targets}
    if record.runs:
        stems = set(names.layer.values()) | {_stem(name) for name in (*names.exact.values(), *moved)}
        assert set(_shapes(record)) | _parameters(record) <= stems, "stems without a Hugging Face name"
    ends = {"token_embd", *(stem for stem, there in _optional_ends(record).items() if there)}
    assert ends <= set(names.top.values()), "the embedding"
    for inside, gguf in names.exact.items():
        assert (
            names.to_gguf(f"{prefix}7.{inside}") == f"blk.7.{gguf}"
            and names.to_hf(f"blk.7.{gguf}") == f"{prefix}7.{inside}"
        )
    assert set(names.also_read.values()) <= set(names.layer.values()), "also_read maps to an unknown tensor"
    for table, hf_prefix, gguf_prefix in ((names.top, "", ""), (names.layer, f"{prefix}7.", "blk.7.")):
        assert len(set(table.values())) == len(table), "two names for one tensor: move the second to also_read"
        for hf, gguf in table.items():
            for suffix in ("weight", "bias"):
                assert names.to_gguf(f"{hf_prefix}{hf}.{suffix}") == f"{gguf_prefix}{gguf}.{suffix}"
                assert names.to_hf(f"{gguf_prefix}{gguf}.{suffix}") == f"{hf_prefix}{hf}.{suffix}"
    for hf, gguf in names.also_read.items():
        assert names.to_gguf(f"{prefix}0.{hf}.weight") == f"blk.0.{gguf}.weight"
    assert names.to_gguf(f"{prefix}0.no.such.weight") is None and names.to_hf("blk.0.no_such.weight") is None


def check_wiring(record: Architecture) -> None:
    """Check that feeds, changes and biases refer to existing tensors, and each matrix has one source of its width."""
    if not record.runs:
        return
    shapes = _shapes(record)
    readers = [stem for feed in record.layer.feeds for stem in feed.readers]
    matrices = {stem for stem, shape in shapes.items() if len(shape) > 1}
    assert len(set(readers)) == len(readers) and matrices <= set(readers), (
        "each matrix must be the reader of exactly one feed"
    )
    assert not set(readers) & (set(shapes) - matrices), "a vector is listed as a reader"
    for feed in record.layer.feeds:
        if not set(feed.readers) & matrices:
            continue  # belongs to a kind of layer that the tiny model lacks
        assert feed.readers and (feed.source in shapes or feed.kind == "stream"), (
            f"a feed from an unknown source {feed.source}"
        )
        assert (len(shapes.get(feed.source, "")) == 1) == (feed.kind == "norm"), f"{feed.source} is not a {feed.kind}"
        if feed.kind == "norm":
            assert record.readers_of(feed.source) == feed.readers
            for index in range(tiny_hyper(record).layers):
                here = record.layer.shapes(tiny_hyper(record), index)
                widths = {here[r][-1] for r in feed.readers if r in here}
                assert widths <= set(here.get(feed.source, ())), f"widths of the readers of {feed.source}"
    assert record.linears == set(readers)
    kernels = _parameters(record)
    known = (
        set(shapes)
        | kernels
        | {f"{stem}.bias" for stem in kernels}
        | set(record.names.exact.values())
        | set(record.names.top.values())
    )
    assert set(record.changes) <= known, "a change of an unknown tensor"
    assert {stem for bias in record.biases for stem in bias.stems} <= record.linears | kernels, (
        "a bias without a linear layer"
    )


def check_hyper(record: Architecture) -> None:
    """Check that hyper-parameters round-trip through config.json and GGUF metadata."""
    hyper, table = tiny_hyper(record), record.hyper
    assert len({key.name for key in table.keys}) == len(table.keys), "two rows for one hyper-parameter"
    assert replace(table.read_config(table.to_config(hyper)), windows=()) == hyper
    metadata, warnings = table.to_metadata(hyper)
    stored = {f"{record.name}.{key}": meta.value for key, meta in metadata.items()}
    assert replace(table.read_metadata(stored, record.name, vocab=hyper.vocab, tied=False), windows=()) == hyper
    assert not warnings


def check_found(record: Architecture) -> None:
    """Check that files of this architecture are matched to its record."""
    match = by_name(record.name)
    assert match is not None and match.name == record.name, "no entry point, and not in registry.ARCHITECTURES"
    for said in _ways_to_say(record):
        assert of_config({**record.hyper.to_config(tiny_hyper(record)), **said}) is record, said


def check_model(record: Architecture, folder: Path, *, seed: int = 0) -> None:
    """Check a tiny model: GGUF round trip, equal finite logits (or states), `validate`, and calibration of decoders.

    folder: an empty folder to work in.
    """
    source = tiny_model(record, folder / "hf", seed=seed)
    gguf, back = folder / "model.gguf", folder / "back"
    convert(source, gguf, to="gguf", codec="f32", architecture=record.name)
    convert(gguf, back, to="hf", codec="f32")
    _same_tensors(open_checkpoint(source), open_checkpoint(back))
    record_read = of_metadata(open_checkpoint(gguf).metadata)
    assert record_read is not None and open_checkpoint(back).config["architectures"] == [record_read.class_name]
    outputs = [_output(load(path, activations="float")) for path in (source, gguf, back)]
    assert all(np.isfinite(x).all() and np.ptp(x) > 0 for x in outputs)
    for other in outputs[1:]:
        np.testing.assert_allclose(other, outputs[0], rtol=0, atol=1e-4)
    assert np.isfinite(_output(load(gguf))).all()
    for path in (source, gguf, back):
        assert not [f for f in validate(path) if f.severity is Severity.ERROR]
    if not record.encoder:
        _calibrates(record, source, folder / "samples.json")


def _output(model: Model) -> F32:
    """Return the model's output: logits, or the states of an encoder."""
    return model.states(_TOKENS) if model.architecture.encoder else model.logits(_TOKENS)


def tiny_hyper(record: Architecture) -> Hyper:
    """Return tiny hyper-parameters: two layers of 64 (or three), four heads of 32, two KV heads, 40 tokens.

    Defaults for keys that its config.json lacks.
    """
    usual: dict[str, Any] = {
        "layers": 2, "context": 128, "hidden": 64, "feed_forward": 96, "heads": 4, "kv_heads": 2, "head_dim": 32,
        "norm_eps": 1e-5,
        "rope_theta": 20000.0, "vocab": 40,
    }  # fmt: skip
    rows = {key.name: key for key in record.hyper.keys}
    usual["layers"] += "layer_feed_forward" in rows
    for name, key in rows.items():
        if name in usual and not key.config and key.read is None:
            usual[name] = usual[key.default] if isinstance(key.default, str) else key.default
    share, size = rows["rotated"].default if "rotated" in rows else 1.0, usual["head_dim"] or 64 // 4
    rotated = int(size * share) if isinstance(share, float) else 0
    activation = str(rows["activation"].default if "activation" in rows else "silu")
    more = {name: _sample(key, usual["layers"]) for name, key in rows.items() if name not in _FIELDS}
    for name, key in rows.items():
        if name in more and key.kind != "text" and isinstance(key.default, str):
            more[name] = usual[key.default]
    return Hyper(
        **usual, rope={}, activation=activation, tied=False, rotated=rotated if rotated != size else 0, more=more
    )


def _sample(key: Key, layers: int) -> Value:
    sample = _SAMPLES.get(key.name)
    if sample is not None and (key.default is None or not isinstance(sample, tuple)):
        return sample[:layers] if isinstance(sample, tuple) else sample
    if key.gguf is None and key.default is not None:
        return key.default  # GGUF readers support no other value
    if key.kind == "real":
        return 0.375
    return max(2, key.low) if key.default is None else key.default


def tiny_model(record: Architecture, folder: Path, *, seed: int = 0) -> Path:
    """Write a Hugging Face folder with random float32 weights.

    Linear layers of ternary architectures have two values.
    """
    rng, hyper = np.random.default_rng(seed), tiny_hyper(record)
    arrays: dict[str, F32] = {}
    numbers: dict[str, F32] = {}
    for name, shape in _tensors(record, hyper):
        stem = _stem(name)
        inside = stem.split(".", 2)[2] if stem.startswith("blk.") else stem
        values = rng.standard_normal(shape, np.float32) * np.float32(0.2)
        if inside == _DECAY:
            values = -np.abs(values)
        if record.ternary is not None and inside in record.linears:
            values = np.where(values < 0, np.float32(-_STEP), np.float32(_STEP))
        arrays[name] = values + np.float32(1) if len(shape) == 1 and inside != _DECAY else values
        if name == f"{stem}.weight" and any(inside in bias.stems for bias in record.biases):
            arrays[f"{stem}.bias"] = rng.standard_normal(shape[0], np.float32)
    for inside, number in record.layer_numbers.items():
        for index in range(hyper.layers):
            numbers[f"{record.names.prefix}{index}.{inside}"] = rng.uniform(0.1, 1, number.shape).astype(np.float32)
    f32 = registry.codec("f32")
    held = (Weight(n, a.shape, f32, {}) for n, a in arrays.items())
    mapped = hf_maps(held, record, hyper, None)
    assert not mapped.strange, mapped.strange
    tensors = {m.target: np.asarray(m.op.reference([arrays[n] for n in m.sources]), np.float32) for m in mapped.maps}
    tensors = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
    said = next(iter(_ways_to_say(record)), {"model_type": record.model_type, "architectures": [record.class_name]})
    biased = {bias.key: True for bias in record.biases if bias.key is not None}
    if record.hyper.gguf_windows is not None:
        hyper = replace(hyper, windows=record.hyper.gguf_windows(hyper))
    config = {**record.hyper.to_config(hyper), **biased, **said, "torch_dtype": "float32"}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(tensors | numbers, folder / "model.safetensors", {"format": "pt"})
    return folder


def _ways_to_say(record: Architecture) -> Iterator[dict[str, Any]]:
    """Yield the entries of config.json that select this architecture."""
    for name in record.claims:
        yield {"model_type": record.model_type, "architectures": [name]}
    for kind in record.reads:
        yield {"model_type": kind, "architectures": [record.class_name]}


def _stem(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias")


def _shapes(record: Architecture) -> dict[str, Shape]:
    """Return stem -> shape in the last layer that has it."""
    hyper = tiny_hyper(record)
    return {k: v for index in range(hyper.layers) for k, v in record.layer.shapes(hyper, index).items()}


def _parameters(record: Architecture) -> set[str]:
    """Return the stems of tensors that are neither linears nor norms, in any layer."""
    hyper = tiny_hyper(record)
    return {_stem(name) for index in range(hyper.layers) for name in record.layer.parameters(hyper, index)}


def _tensors(record: Architecture, hyper: Hyper) -> Iterator[tuple[str, Shape]]:
    """Yield (GGUF name, shape) of each tensor."""
    yield "token_embd.weight", (hyper.vocab, hyper.hidden)
    shapes = {"position_embd": (hyper.context, hyper.hidden), "token_types": (hyper.count("token_types"), hyper.hidden)}
    for stem, there in _optional_ends(record).items():
        if there:
            yield f"{stem}.weight", shapes.get(stem, (hyper.hidden,))
    for index in range(hyper.layers):
        for stem, shape in record.layer.shapes(hyper, index).items():
            bare = stem in record.names.exact.values()  # GGUF uses this name without a suffix
            yield f"blk.{index}.{stem}{'' if bare else '.weight'}", shape
        for inside, shape in record.layer.parameters(hyper, index).items():
            yield f"blk.{index}.{inside}", shape
    if record.ends.last and not record.ends.bare:
        yield f"{record.ends.last_stem}.weight", (hyper.hidden,)
    if not record.encoder:
        yield "output.weight", (hyper.vocab, hyper.hidden)


def _optional_ends(record: Architecture) -> dict[str, bool]:
    """Return the stems before the layers other than the token embedding, and whether the architecture has them."""
    ends = record.ends
    return {"position_embd": ends.positions, "token_types": ends.types, "token_embd_norm": ends.norm}


def _same_tensors(a: Checkpoint, b: Checkpoint) -> None:
    assert set(a) == set(b), set(a) ^ set(b)
    for name in a:
        rounded = 1e-6 if name.endswith("A_log") else 0.0  # the logarithm of GGUF's value
        np.testing.assert_allclose(b[name].dequantize(), a[name].dequantize(), rtol=rounded, atol=rounded, err_msg=name)


def _calibrates(record: Architecture, source: Path, samples: Path) -> None:
    """Check that every linear of every layer receives inputs."""
    rng, hyper = np.random.default_rng(1), tiny_hyper(record)
    samples.write_text(json.dumps(rng.integers(0, hyper.vocab, (4, 32)).tolist()), encoding="utf-8")
    stages = calibration_stages(source, samples)
    wanted = {
        name
        for i in range(hyper.layers)
        for s, shape in record.layer.shapes(hyper, i).items()
        if s in record.linears and len(shape) == 2 and (name := record.names.to_hf(f"blk.{i}.{s}.weight")) is not None
    }
    assert wanted <= {name for names in stages.names for name in names}
    for index, names in enumerate(stages.names):
        seen = stages.run(index, frozenset(names), lambda _: None)
        assert set(seen) == set(names)
