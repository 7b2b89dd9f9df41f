"""Every checkpoint that `convert` writes reads back equal: random models, in every format and through several.

Truncated and changed files: tests/formats/test_corruption.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polyquant as pq
from folders import safetensors_bytes
from polyquant.architectures.find import by_name
from polyquant.errors import PolyquantError
from polyquant.types import as_matrix

MANY = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
FEW = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
GGUF = ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4")
MSMODELSLIM = ("w8a16", "w8a16.g32", "w4a16", "w4a16.g16", "w8a8.dynamic", "w4a8.dynamic")
TRELLIS = ("trellis.2.grid", "trellis.3.grid", "trellis.5.grid", "trellis.3.mcg.10", "trellis.2.mul1.8")


@dataclass(frozen=True)
class Llama:
    """A model of random weights."""

    hidden: int
    heads: int
    groups: int
    inner: int
    layers: int
    vocab: int
    tied: bool
    dtype: str
    seed: int

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        size = self.hidden // self.heads
        rows = {"q": self.heads, "k": self.groups, "v": self.groups}
        shapes = {f"self_attn.{k}_proj": (n * size, self.hidden) for k, n in rows.items()}
        shapes |= {"self_attn.o_proj": (self.hidden, self.hidden), "mlp.down_proj": (self.hidden, self.inner)}
        shapes |= {f"mlp.{k}_proj": (self.inner, self.hidden) for k in ("gate", "up")}
        shapes |= {"input_layernorm": (self.hidden,), "post_attention_layernorm": (self.hidden,)}
        names = {f"model.layers.{i}.{k}.weight": v for i in range(self.layers) for k, v in shapes.items()}
        names |= {"model.embed_tokens.weight": (self.vocab, self.hidden), "model.norm.weight": (self.hidden,)}
        names |= {} if self.tied else {"lm_head.weight": (self.vocab, self.hidden)}
        rng = np.random.default_rng(self.seed)
        arrays = {k: rng.normal(size=v).astype(DTYPES[self.dtype]) for k, v in names.items()}
        tensors = {k: (self.dtype, list(v.shape), v.tobytes()) for k, v in arrays.items()}
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.hidden,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.groups,
            "head_dim": size, "intermediate_size": self.inner, "vocab_size": self.vocab, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64, "rope_theta": 1e4, "tie_word_embeddings": self.tied, "hidden_act": "silu",
            "rope_scaling": None, "bos_token_id": 0, "eos_token_id": 1,
            "torch_dtype": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[self.dtype],
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        return folder


@st.composite
def llamas(draw):
    heads = draw(st.sampled_from([1, 2, 4]))
    return Llama(
        hidden=32 * heads * draw(st.integers(1, 2)),
        heads=heads,
        groups=draw(st.sampled_from([n for n in (1, 2, 4) if n <= heads])),
        inner=32 * draw(st.integers(1, 5)),
        layers=draw(st.integers(1, 2)),
        vocab=draw(st.integers(2, 40)),
        tied=draw(st.booleans()),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        seed=draw(st.integers(0, 99)),
    )


def contents(path):
    """Tensor -> codec, shape and bytes of its parts."""
    weights = pq.open(path).items()
    return {name: (w.codec.name, w.shape, {k: v.tobytes() for k, v in w.read().items()}) for name, w in weights}


def values(path):
    return {name: w.dequantize() for name, w in pq.open(path).items()}


def no_errors(path):
    assert not [f for f in pq.validate(path) if f.severity.name == "ERROR"]


@MANY
@given(
    model=llamas(),
    shards=st.lists(st.tuples(st.sampled_from(["gguf", "hf"]), st.sampled_from([None, 5000])), min_size=1, max_size=3),
    threads=st.sampled_from([1, 2]),
)
def test_floats_are_equal_after_any_sequence_of_formats(model, shards, threads, tmp_path_factory):
    """GGUF stores permuted rows under other names, so the last step goes back to a folder."""
    top = tmp_path_factory.mktemp("floats")
    source = place = model.write(top / "model")
    for i, (to, size) in enumerate([*shards, ("hf", None)]):
        target = top / (f"{i}.gguf" if to == "gguf" else f"{i}")
        pq.convert(place, target, to=to, codec="f32", shard_bytes=size, threads=threads)
        place = target if target.exists() else sorted(top.glob(f"{i}-00001-of-*.gguf"))[0]
        no_errors(place)
    before, after = values(source), values(place)
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert array.tobytes() == after[name].tobytes(), name
    configs = [json.loads((p / "config.json").read_text()) for p in (source, place)]
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
                "intermediate_size", "tie_word_embeddings"):  # fmt: skip
        assert configs[0][key] == configs[1][key], key


@MANY
@given(model=llamas(), codec=st.sampled_from(GGUF), threads=st.sampled_from([1, 2]))
def test_rows_of_a_gguf_have_the_values_of_their_codec(model, codec, threads, tmp_path_factory):
    """Rows are permuted in GGUF, and back in the folder made of it; their values are those of the codec."""
    top = tmp_path_factory.mktemp("gguf")
    source = model.write(top / "model")
    pq.convert(source, top / "x.gguf", codec=codec, threads=threads)
    no_errors(top / "x.gguf")
    pq.convert(top / "x.gguf", top / "back", to="hf", codec="f32")
    record, stored, back = by_name("llama"), pq.open(top / "x.gguf"), values(top / "back")
    assert record is not None
    for name, array in values(source).items():
        used = stored[record.names.to_gguf(name)].codec
        assert used.name in (codec, "f32")
        expected = used.dequantize(used.pack(used.quantize(array.reshape(as_matrix(array.shape)))), array.shape)
        assert expected.tobytes() == back[name].tobytes(), (name, used.name)
    pq.convert(top / "x.gguf", top / "copy.gguf", shard_bytes=3000)
    assert contents(sorted(top.glob("copy*"))[0]) == contents(top / "x.gguf")


@pytest.mark.parametrize("target, codecs", [("msmodelslim", MSMODELSLIM), ("trellis-v3", TRELLIS)])
@FEW
@given(data=st.data())
def test_matrices_of_a_folder_have_the_values_of_their_codec(target, codecs, data, tmp_path_factory):
    model, codec = data.draw(llamas()), data.draw(st.sampled_from(codecs))
    shard_bytes = data.draw(st.sampled_from([None, 5000]))
    top = tmp_path_factory.mktemp("folder")
    source = model.write(top / "model")
    try:
        pq.convert(source, top / "x", to=target, codec=codec, shard_bytes=shard_bytes)
    except PolyquantError as problem:
        assert "\n" not in str(problem) and sorted(p.name for p in top.iterdir()) == ["model"]
        return
    no_errors(top / "x")
    arrays, written = pq.open(source), pq.open(top / "x")
    assert arrays.keys() == written.keys()
    coded = 0
    for name, weight in written.items():
        w, used, parts = arrays[name].dequantize(), weight.codec, weight.read()
        coded += used.name not in ("f32", "f16", "bf16")
        expected = used.pack(used.quantize(w.reshape(as_matrix(w.shape))))
        assert {k: v.tobytes() for k, v in parts.items()} == {k: expected[k].tobytes() for k in parts}, name
    assert coded >= 7 * model.layers
    pq.convert(top / "x", top / "floats", to="hf", codec="f32")
    for name, array in values(top / "floats").items():
        assert array.tobytes() == written[name].dequantize().tobytes(), name
