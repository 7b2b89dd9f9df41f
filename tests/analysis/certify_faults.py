"""Faults that are injected into genuine conversions, and the code of the finding that must name each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import polyquant
from analysis.certify_target import Fault, Target
from polyquant.opening import open_checkpoint
from polyquant.types import Kind, Meta

__all__ = ["FAULTS"]


def rows(t: Target, name: str, order: Callable[[np.ndarray], np.ndarray]) -> None:
    """Permute the rows (of the last matrix axis) of a tensor."""
    x = t[name]
    t[name] = x[..., order(np.arange(x.shape[-2])), :] if x.ndim > 1 else x[order(np.arange(len(x)))]


def swapped(a: int, b: int) -> Callable[[np.ndarray], np.ndarray]:
    def order(i: np.ndarray) -> np.ndarray:
        out = i.copy()
        out[[a, b]] = out[[b, a]]
        return out

    return order


def halves_from_pairs(heads: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda i: i.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def pairs_from_halves(heads: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda i: i.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def stack(t: Target, name: str, order: list[int]) -> None:
    t.matrix(name, lambda x: x[order])


def set_part(t: Target, name: str, where: tuple[slice, ...], values: object) -> None:
    def change(x: np.ndarray) -> np.ndarray:
        x[where] = values(x[where]) if callable(values) else values
        return x

    t.matrix(name, change)


def layers(t: Target, a: int, b: int) -> None:
    for name in [n for n in open_checkpoint(t.path) if n.startswith(f"blk.{a}.")]:
        t.exchange(name, name.replace(f"blk.{a}.", f"blk.{b}."))


def coarser(t: Target, name: str, codec: str) -> None:
    """Quantize to fewer bits, and store the result in the tensor's codec."""
    coarse = polyquant.codec(codec)
    x = t[name]
    t[name] = coarse.dequantize(coarse.pack(coarse.quantize(x)), x.shape)


def as_f16(t: Target, name: str) -> None:
    """The bytes of a float16 tensor in a tensor declared as bfloat16."""
    t.write(name, "blocks", t[name].astype(np.float16).view(np.uint16).astype("<u2"))


def other_bytes(t: Target, name: str, size: int) -> None:
    t.write(name, "blocks", t.stored(name, "blocks").reshape(-1, size)[:, ::-1])


def symbols(t: Target, name: str, order: tuple[int, int, int]) -> None:
    x = t[name]
    scale = np.abs(x).max()
    t[name] = np.choose(np.rint(x / scale).astype(int) + 1, order) * scale


def template(body: dict) -> None:
    body["chat_template"] = "{{ messages[0].content }}"


def exchange_ids(body: dict) -> None:
    vocab = body["model"]["vocab"]
    a, b = list(vocab)[50], list(vocab)[60]
    vocab[a], vocab[b] = vocab[b], vocab[a]


def split_digits(pre: dict) -> dict:
    return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, pre]}


def rewrite_i2_s(t: Target, name: str) -> None:
    """Write a tensor in the layout of another processor."""
    weight = open_checkpoint(t.path, ternary_layout="i2_s.x86")[name]
    other = polyquant.codec("i2_s.arm")
    codes = weight.codec.unpack(weight.parts, weight.shape)
    for part, array in other.pack(codes).items():
        t.write(name, part, array)


K = "blk.1.ffn_up.weight"
Q, KEY, V, OUT = (f"blk.1.attn_{s}.weight" for s in ("q", "k", "v", "output"))
EXPERTS = "blk.1.ffn_{}_exps.weight".format
LLAMA, MOE = "llama3", "qwen3_moe"

FAULTS = [
    # ------------------------------------------------------------ experts and routers
    Fault(
        "two experts exchanged", MOE, "CER011", lambda t: stack(t, EXPERTS("up"), [0, 1, 2, 7, 4, 5, 6, 3]), "3 and 7"
    ),
    Fault("experts rotated", MOE, "CER011", lambda t: stack(t, EXPERTS("down"), [7, 0, 1, 2, 3, 4, 5, 6]), "0 holds 7"),
    Fault(
        "experts exchanged, q8_0",
        MOE,
        "CER011",
        lambda t: stack(t, EXPERTS("gate"), [1, 0, 2, 3, 4, 5, 6, 7]),
        "0 and 1",
        codec="q8_0",
    ),
    Fault(
        "experts exchanged, q4_0",
        MOE,
        "CER011",
        lambda t: stack(t, EXPERTS("gate"), [1, 0, 2, 3, 4, 5, 6, 7]),
        "0 and 1",
        codec="q4_0",
    ),
    Fault(
        "experts exchanged, folder",
        "mixtral",
        "CER011",
        lambda t: [
            t.exchange(
                f"model.layers.1.block_sparse_moe.experts.0.w{w}.weight",
                f"model.layers.1.block_sparse_moe.experts.3.w{w}.weight",
            )
            for w in (1, 2, 3)
        ],
        "0 and 3",
        to="hf",
    ),
    Fault(
        "experts of MXFP4 exchanged",
        "gpt_oss_mxfp4",
        "CER011",
        lambda t: stack(t, EXPERTS("up"), [2, 1, 0, 3]),
        "0 and 2",
    ),
    Fault(
        "rows of the router permuted",
        MOE,
        "CER017",
        lambda t: rows(t, "blk.1.ffn_gate_inp.weight", lambda i: i[::-1]),
        "scores",
    ),
    Fault(
        "expert biases permuted",
        "gpt_oss",
        "CER017",
        lambda t: t.matrix("blk.1.ffn_up_exps.bias", lambda x: x[[1, 0, 2, 3]]),
        "0 and 1",
    ),
    Fault("one expert zero", MOE, "CER020", lambda t: set_part(t, EXPERTS("up"), (slice(2, 3),), 0)),
    # ------------------------------------------------------------ gate, up and other tensors
    Fault("gate and up exchanged", LLAMA, "CER013", lambda t: t.exchange("blk.1.ffn_gate.weight", K), "exchanged with"),
    Fault("gate and up of experts exchanged", MOE, "CER013", lambda t: t.exchange(EXPERTS("gate"), EXPERTS("up"))),
    Fault(
        "gate and up of one expert exchanged",
        MOE,
        "CER013",
        lambda t: set_part(t, EXPERTS("gate"), (slice(3, 4),), t[EXPERTS("up")][3:4]),
        "rows 96 to 127",
    ),
    Fault(
        "halves of gate_up exchanged",
        "phi3",
        "CER013",
        lambda t: rows(t, "blk.1.ffn_up.weight", lambda i: np.roll(i, len(i) // 2)),
        "halves",
    ),
    Fault(
        "halves of gate_up exchanged, folder",
        "phi3",
        "CER013",
        lambda t: rows(t, "model.layers.1.mlp.gate_up_proj.weight", lambda i: np.roll(i, len(i) // 2)),
        "halves",
        to="hf",
    ),
    Fault(
        "gate and up interleaved", "phi3", "CER013", lambda t: rows(t, "blk.1.ffn_up.weight", lambda i: i ^ 1), "even"
    ),
    Fault("q and output exchanged", LLAMA, "CER012", lambda t: t.exchange(Q, OUT)),
    Fault("k and v exchanged", LLAMA, "CER012", lambda t: t.exchange(KEY, V), V),
    Fault("layers exchanged", LLAMA, "CER014", lambda t: layers(t, 0, 2), "layers 0 and 2"),
    Fault("layers exchanged, q8_0", "qwen2", "CER014", lambda t: layers(t, 1, 2), "layers 1 and 2", codec="q8_0"),
    Fault("q of another layer", LLAMA, "CER012", lambda t: t.__setitem__(Q, t["blk.2.attn_q.weight"]), "blk.2.attn_q"),
    Fault(
        "one tile of another tensor",
        LLAMA,
        "CER019",
        lambda t: set_part(t, K, (slice(16, 32), slice(32, 64)), t["blk.1.ffn_gate.weight"][16:32, 32:64]),
        "rows 16 to 31",
    ),
    Fault(
        "one tile of another tensor, large",
        "tiny-llama-untied",
        "CER019",
        lambda t: set_part(t, K, (slice(16, 32), slice(128, 256)), t["blk.0.ffn_up.weight"][16:32, 128:256]),
        "columns 128 to 255",
    ),
    Fault(
        "one tile of another tensor, q4_k",
        "tiny-llama-untied",
        "CER019",
        lambda t: set_part(t, K, (slice(16, 32), slice(0, 256)), t["blk.0.ffn_up.weight"][16:32, 0:256]),
        "rows 16 to 31",
        codec="q4_k",
    ),
    # ------------------------------------------------------------ rows and heads
    Fault(
        "q in the rotary order of Hugging Face", LLAMA, "CER015", lambda t: rows(t, Q, halves_from_pairs(4)), "halves"
    ),
    Fault("k in the rotary order of Hugging Face", LLAMA, "CER015", lambda t: rows(t, KEY, halves_from_pairs(2))),
    Fault("q permuted twice", LLAMA, "CER015", lambda t: rows(t, Q, pairs_from_halves(4))),
    Fault("k permuted without need", "qwen2", "CER015", lambda t: rows(t, KEY, pairs_from_halves(2)), "pairs"),
    Fault(
        "rotary bias permuted without need",
        "qwen2",
        "CER015",
        lambda t: t.matrix("blk.1.attn_q.bias", lambda x: x[pairs_from_halves(4)(np.arange(64))]),
    ),
    Fault(
        "rotary rows in a folder",
        LLAMA,
        "CER015",
        lambda t: rows(t, "model.layers.1.self_attn.q_proj.weight", pairs_from_halves(4)),
        to="hf",
    ),
    Fault("rotary rows, q4_k", "tiny-llama-untied", "CER015", lambda t: rows(t, Q, halves_from_pairs(4)), codec="q4_k"),
    Fault("v permuted by head", LLAMA, "CER016", lambda t: rows(t, V, lambda i: i.reshape(2, -1)[::-1].reshape(-1))),
    Fault(
        "q heads rotated", LLAMA, "CER016", lambda t: rows(t, Q, lambda i: np.roll(i.reshape(4, -1), 1, 0).reshape(-1))
    ),
    Fault("square matrix transposed", "qwen2", "CER018", lambda t: t.matrix(OUT, lambda x: x.T)),
    Fault(
        "square matrix transposed, q8_0",
        "tiny-llama-untied",
        "CER018",
        lambda t: t.matrix(OUT, lambda x: x.T),
        codec="q8_0",
    ),
    Fault(
        "square matrix transposed, q2_k",
        "tiny-llama-untied",
        "CER018",
        lambda t: t.matrix(OUT, lambda x: x.T),
        codec="q2_k",
    ),
    Fault("two rows exchanged", LLAMA, "CER017", lambda t: rows(t, K, swapped(5, 77)), "5 and 77"),
    Fault(
        "two rows exchanged, q4_0",
        "tiny-llama-untied",
        "CER017",
        lambda t: rows(t, K, swapped(5, 77)),
        "5 and 77",
        codec="q4_0",
    ),
    Fault(
        "embedding shifted by a row",
        "qwen2",
        "CER017",
        lambda t: rows(t, "token_embd.weight", lambda i: np.roll(i, 1)),
        "shifted by +1",
    ),
    Fault(
        "two rows of the head exchanged",
        MOE,
        "CER017",
        lambda t: rows(t, "output.weight", swapped(3, 300)),
        "3 and 300",
    ),
    # ------------------------------------------------------------ values
    Fault(
        "one block zero",
        "tiny-llama-untied",
        "CER020",
        lambda t: set_part(t, K, (slice(7, 8), slice(32, 64)), 0),
        "rows 7",
        codec="q8_0",
    ),
    Fault(
        "one block zero, q4_0",
        "tiny-llama-untied",
        "CER020",
        lambda t: set_part(t, K, (slice(7, 8), slice(32, 64)), 0),
        codec="q4_0",
    ),
    Fault("matrix zero", LLAMA, "CER020", lambda t: set_part(t, K, (slice(None),), 0)),
    Fault(
        "one row with the opposite sign",
        LLAMA,
        "CER021",
        lambda t: set_part(t, K, (slice(9, 10),), np.negative),
        "rows 9",
    ),
    Fault(
        "one row with the opposite sign, q2_k",
        "tiny-llama-untied",
        "CER021",
        lambda t: set_part(t, K, (slice(9, 10),), np.negative),
        "rows 9",
        codec="q2_k",
    ),
    Fault("scale of a tensor doubled", LLAMA, "CER022", lambda t: t.matrix(K, lambda x: 2 * x), "by 2"),
    Fault(
        "scale of a row doubled, q4_0",
        "tiny-llama-untied",
        "CER022",
        lambda t: set_part(t, K, (slice(3, 4),), lambda x: 2 * x),
        "by 2",
        codec="q4_0",
    ),
    Fault(
        "scale of a tensor halved, q2_k",
        "tiny-llama-untied",
        "CER022",
        lambda t: t.matrix(K, lambda x: x / 2),
        codec="q2_k",
    ),
    Fault(
        "quantized to fewer bits first", "tiny-llama-untied", "CER024", lambda t: coarser(t, K, "q4_0"), codec="q8_0"
    ),
    Fault("floats of two bits", "tiny-llama-untied", "CER024", lambda t: coarser(t, K, "q2_k")),
    Fault("NaN", LLAMA, "CER004", lambda t: set_part(t, K, (slice(4, 5), slice(0, 1)), np.nan), codec="f32"),
    Fault(
        "noise",
        LLAMA,
        "CER010",
        lambda t: t.matrix(K, lambda x: np.random.default_rng(1).standard_normal(x.shape).astype(np.float32) * x.std()),
    ),
    Fault("float16 bytes declared as bfloat16", LLAMA, "CER025", lambda t: as_f16(t, K), "f16"),
    Fault("bytes of bfloat16 swapped", LLAMA, "CER025", lambda t: other_bytes(t, K, 2), "byte order"),
    Fault("bytes of float32 swapped", LLAMA, "CER025", lambda t: other_bytes(t, K, 4), codec="f32"),
    # ------------------------------------------------------------ norms and biases
    Fault(
        "norm shifted twice",
        "gemma",
        "CER023",
        lambda t: t.matrix("blk.1.attn_norm.weight", lambda x: x + 1),
        "1 too large",
    ),
    Fault(
        "norm not shifted",
        "gemma2",
        "CER023",
        lambda t: t.matrix("blk.1.ffn_norm.weight", lambda x: x - 1),
        "1 too small",
    ),
    Fault("norm shifted without need", LLAMA, "CER023", lambda t: t.matrix("output_norm.weight", lambda x: x + 1)),
    Fault("norms exchanged", LLAMA, "CER012", lambda t: t.exchange("blk.1.attn_norm.weight", "blk.1.ffn_norm.weight")),
    Fault(
        "norm of q shifted", "gemma3_text", "CER023", lambda t: t.matrix("blk.1.attn_q_norm.weight", lambda x: x - 1)
    ),
    Fault("bias zero", "qwen2", "CER020", lambda t: t.matrix("blk.1.attn_q.bias", lambda x: 0 * x)),
    Fault("bias negated", "qwen2", "CER021", lambda t: t.matrix("blk.1.attn_k.bias", np.negative)),
    Fault(
        "bias of another layer", "qwen2", "CER012", lambda t: t.__setitem__("blk.1.attn_v.bias", t["blk.2.attn_v.bias"])
    ),
    Fault("norm scaled", LLAMA, "CER022", lambda t: t.matrix("blk.0.ffn_norm.weight", lambda x: 3 * x), "by 3"),
    Fault("decay not converted", "mamba2", "CER029", lambda t: t.matrix("blk.1.ssm_a", lambda x: np.log(-x))),
    Fault("RoPE divisors lost", LLAMA, "CER022", lambda t: t.matrix("rope_freqs.weight", lambda x: x * 4)),
    # ------------------------------------------------------------ tensors
    Fault(
        "tensor missing",
        "qwen2",
        "CER001",
        lambda t: polyquant.edit(t.path, rename_tensor={"blk.1.attn_q.bias": "blk.1.attn_q.bixs"}),
        "missing",
        also=("CER002",),
    ),
    Fault(
        "tensor extra",
        "qwen2",
        "CER002",
        lambda t: polyquant.edit(t.path, rename_tensor={"blk.1.attn_q.bias": "blk.1.attn_z.bias"}),
        "not in the source",
        also=("CER001",),
    ),
    Fault(
        "head missing",
        MOE,
        "CER028",
        lambda t: polyquant.edit(t.path, rename_tensor={"output.weight": "outpux.weight"}),
        "separate head",
        also=("CER002",),
    ),
    Fault(
        "head of other values",
        "tiny-llama-untied",
        "CER012",
        lambda t: t.__setitem__("output.weight", t["token_embd.weight"]),
        "token_embd",
    ),
    Fault(
        "head tied in config.json",
        "tiny-llama-untied",
        "CER028",
        lambda t: t.json("config.json", lambda c: c.update(tie_word_embeddings=True)),
        to="hf",
    ),
    # ------------------------------------------------------------ hyper-parameters
    Fault("architecture", LLAMA, "CER030", lambda t: t.key("general.architecture", "qwen2")),
    Fault("epsilon", LLAMA, "CER032", lambda t: t.key("layer_norm_rms_epsilon", 1e-6)),
    Fault(
        "epsilon, folder",
        LLAMA,
        "CER032",
        lambda t: t.json("config.json", lambda c: c.update(rms_norm_eps=1e-6)),
        to="hf",
    ),
    Fault("RoPE base", LLAMA, "CER033", lambda t: t.key("rope.freq_base", 10000.0)),
    Fault("RoPE scaling factor", "gemma3_text", "CER033", lambda t: t.key("rope.scaling.factor", 2.0)),
    Fault(
        "RoPE scaling, folder",
        LLAMA,
        "CER033",
        lambda t: t.json("config.json", lambda c: [c.pop("rope_scaling", None), c.pop("rope_parameters", None)]),
        to="hf",
    ),
    Fault("rotated dimensions", "glm4", "CER033", lambda t: t.key("rope.dimension_count", 8)),
    Fault("key/value heads", "qwen2", "CER031", lambda t: t.key("head_count_kv", 4)),
    Fault("heads", "qwen2", "CER031", lambda t: t.key("head_count", 8), also=("CER033",)),
    Fault("sliding window", "gemma3_text", "CER034", lambda t: t.key("sliding_window", 16)),
    Fault(
        "sliding window, folder",
        "gpt_oss",
        "CER034",
        lambda t: t.json("config.json", lambda c: c.update(sliding_window=16)),
        to="hf",
    ),
    Fault("soft cap of logits", "gemma2", "CER034", lambda t: t.key("final_logit_softcapping", 20.0)),
    Fault("soft cap of attention", "gemma2", "CER034", lambda t: t.key("attn_logit_softcapping", 20.0)),
    Fault(
        "activation, folder",
        "qwen2",
        "CER036",
        lambda t: t.json("config.json", lambda c: c.update(hidden_act="gelu")),
        to="hf",
    ),
    Fault("experts used", MOE, "CER035", lambda t: t.key("expert_used_count", 1)),
    Fault(
        "weights of experts normalized, folder",
        MOE,
        "CER035",
        lambda t: t.json("config.json", lambda c: c.update(norm_topk_prob=False)),
        to="hf",
    ),
    Fault("gating", "glm4_moe", "CER035", lambda t: t.key("expert_gating_func", 1)),
    Fault("scale of experts", "glm4_moe", "CER035", lambda t: t.key("expert_weights_scale", 9.0)),
    Fault("residual multiplier", "granite", "CER037", lambda t: t.key("residual_scale", 0.5)),
    Fault("logit multiplier", "granite", "CER037", lambda t: t.key("logit_scale", 0.5)),
    Fault("attention multiplier", "granite", "CER034", lambda t: t.key("attention.scale", 0.5)),
    Fault("number of layers", LLAMA, "CER031", lambda t: t.key("block_count", 2)),
    # ------------------------------------------------------------ tokenizer
    Fault("token order", LLAMA, "CER040", lambda t: t.listed("tokens", lambda x: x.insert(10, x.pop(20)))),
    Fault("merge order", LLAMA, "CER041", lambda t: t.listed("merges", lambda x: x.insert(1, x.pop(20)))),
    Fault("a score", "mixtral", "CER041", lambda t: t.listed("scores", lambda x: x.insert(300, x.pop(400)))),
    Fault("end of text", LLAMA, "CER042", lambda t: t.key("eos_token_id", 5)),
    Fault("beginning of text", LLAMA, "CER042", lambda t: t.key("bos_token_id", 5)),
    Fault(
        "type of a control token",
        LLAMA,
        "CER043",
        lambda t: t.listed("token_type", lambda x: x.__setitem__(x.index(3), 1)),
    ),
    Fault("pre-tokenizer", LLAMA, "CER044", lambda t: t.key("tokenizer.ggml.pre", "llama-bpe"), also=("CER045",)),
    Fault(
        "bos added",
        LLAMA,
        "CER045",
        lambda t: polyquant.edit(t.path, set={"tokenizer.ggml.add_bos_token": Meta(Kind.BOOL, True)}),
    ),
    Fault(
        "chat template",
        LLAMA,
        "CER046",
        lambda t: polyquant.edit(
            t.path, set={"tokenizer.chat_template": Meta(Kind.STRING, "{{ messages[0].content }}")}
        ),
    ),
    Fault("no tokenizer", LLAMA, "CER047", lambda t: polyquant.edit(t.path, remove=["tokenizer.ggml.model"])),
    Fault(
        "token order, folder", LLAMA, "CER040", lambda t: t.json("tokenizer.json", lambda b: exchange_ids(b)), to="hf"
    ),
    Fault(
        "merge order, folder",
        LLAMA,
        "CER041",
        lambda t: t.json("tokenizer.json", lambda b: b["model"]["merges"].insert(0, b["model"]["merges"].pop(9))),
        to="hf",
    ),
    Fault(
        "added-token flag lost, folder",
        LLAMA,
        "CER043",
        lambda t: t.json("tokenizer.json", lambda b: b["added_tokens"][0].update(special=False)),
        to="hf",
    ),
    Fault("chat template, folder", LLAMA, "CER046", lambda t: t.json("tokenizer_config.json", template), to="hf"),
    Fault(
        "pre-tokenizer, folder",
        LLAMA,
        "CER044",
        lambda t: t.json("tokenizer.json", lambda b: b.update(pre_tokenizer=split_digits(b["pre_tokenizer"]))),
        to="hf",
    ),
    # ------------------------------------------------------------ ternary weights
    Fault("ternary symbols permuted", "tiny-bitnet", "CER026", lambda t: symbols(t, K, (0, -1, 1)), codec="tq2_0"),
    Fault("ternary signs", "tiny-bitnet", "CER021", lambda t: t.matrix(K, np.negative), codec="tq2_0"),
    Fault("ternary scale lost", "tiny-bitnet", "CER022", lambda t: t.matrix(K, lambda x: np.sign(x)), codec="tq2_0"),
    Fault("layout of I2_S", "tiny-bitnet", "CER026", lambda t: rewrite_i2_s(t, K), codec="i2_s.x86"),
]
