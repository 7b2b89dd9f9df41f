#!/usr/bin/env python3
"""Train the two small language models in ``polyquant/demo``.

With them every conversion and quantization can be tried, offline and in seconds, on a model that writes sentences and
has a meaningful perplexity; random weights would hide most mistakes.

Two decoders of the same size are trained from scratch on one CPU core each:

* ``llama``: ``LlamaForCausalLM`` in bfloat16;
* ``bitnet``: ``BitNetForCausalLM`` with ternary weights (absmean, straight-through) and int8 activations (absmax per
  token), as in BitNet b1.58; shipped packed, four weights per byte, as transformers reads it.

Text: the King James Bible of 1611, out of copyright (in the United Kingdom the Crown's letters patent still govern
printing). By default it is read from the ``bible`` program (Debian: ``apt install bible-kjv``); ``--text`` names a file
instead. Both are lines of the form ``Ge1:1 In the beginning ...``, as ``echo gen1:1-rev22:21 | bible -f`` prints them.
They are converted to one verse per line without references, with a blank line between chapters. ``HELD_OUT`` lists
chapters not seen by the tokenizer or the models. They have little in common with the rest: 34 of their 12379 ten-word
sequences occur in a training chapter.

Usage::

    python scripts/train_demo_models.py llama --minutes 60     # resumes from its checkpoint; --steps N: fixed count
    python scripts/train_demo_models.py bitnet --minutes 60
    python scripts/train_demo_models.py llama --export-only    # write the folder again from the checkpoint, evaluate

Needs torch, numpy, tokenizers, safetensors; transformers (with accelerate) for the last check only. With ``--steps``
the result depends on the seed and the machine's arithmetic; with ``--minutes`` also on its speed, because the learning
rate follows the clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD = 0, 1, 2
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"]
# fmt: off
HELD_OUT = frozenset((
    "Ge41", "Exo16", "Josh2", "Jdgs16", "Ruth2", "2Ki5", "Neh8", "Est6",
    "Job38", "Psa104", "Prv15", "Eccl3", "Isa40", "Jer31", "Eze37", "Dan5", "Hos11",
    "Luke15", "John11", "Rom8", "1Cor13", "Heb11", "Jas3", "Rev21",
))
# fmt: on
PROMPTS = ("And it came to pass", "Blessed is the man", "And Moses said unto the people,")
SEED = 1611


# ---------------------------------------------------------------------------------------------------------------- text


def read_source(path: Path | None) -> str:
    """Read the Bible as ``Book chapter:verse text`` lines, from a file or the ``bible`` program."""
    if path is not None:
        return path.read_text(encoding="utf-8")
    done = subprocess.run(["bible", "-f"], input="gen1:1-rev22:21\n", capture_output=True, text=True, check=True)
    return done.stdout


def split_text(source: str) -> tuple[list[str], str]:
    """Return (training books, held-out text): one verse per line, a blank line between chapters."""
    chapters: dict[tuple[str, str], dict[int, str]] = {}
    for book, chapter, verse, text in re.findall(r"^([1-3]?[A-Z][A-Za-z]*)(\d+):(\d+) (.+)$", source, re.MULTILINE):
        chapters.setdefault((book, chapter), {})[int(verse)] = " ".join(text.split())
    books: dict[str, list[str]] = {}
    held_out: list[str] = []
    for (book, chapter), verses in chapters.items():
        text = "".join(verses[n] + "\n" for n in sorted(verses))
        (held_out if book + chapter in HELD_OUT else books.setdefault(book, [])).append(text)
    if len(chapters) != 1189 or len(held_out) != len(HELD_OUT):
        raise SystemExit(f"expected 1189 chapters, {len(HELD_OUT)} held out; found {len(chapters)}, {len(held_out)}")
    return ["\n".join(parts) for parts in books.values()], "\n".join(held_out)


def train_tokenizer(books: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer with GPT-2's splitting that can represent every text and prepends BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(books, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BOS]} $A",
        pair=f"{SPECIAL[BOS]} $A {SPECIAL[BOS]}:1 $B:1",
        special_tokens=[(SPECIAL[BOS], BOS)],
    )
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return token ids without BOS."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def batches(
    stream: Tensor, starts: Tensor, rows: int, length: int, rng: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random windows endlessly: half from anywhere, half from the start of a verse after BOS."""
    offsets = torch.arange(length + 1)
    while True:
        anywhere = torch.randint(len(stream) - length - 1, (rows,), generator=rng)
        verse = starts[torch.randint(len(starts), (rows,), generator=rng)] - 1
        behind_bos = torch.rand(rows, generator=rng) < 0.5
        window = stream[torch.where(behind_bos, verse, anywhere)[:, None] + offsets]  # [rows, length + 1]
        window[behind_bos, 0] = BOS
        yield window[:, :-1], window[:, 1:]


# --------------------------------------------------------------------------------------------------------------- model


@dataclasses.dataclass(frozen=True)
class Config:
    """Shape of a model; field names are those of config.json."""

    kind: str
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def to_json(self) -> dict[str, Any]:
        """Return config.json for transformers versions with and without ``rope_parameters``."""
        shape = dataclasses.asdict(self)
        shape.pop("kind")
        out: dict[str, Any] = {
            "architectures": ["BitNetForCausalLM" if self.kind == "bitnet" else "LlamaForCausalLM"],
            "model_type": self.kind,
            **shape,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "relu2" if self.kind == "bitnet" else "silu",
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }
        if self.kind == "llama":
            return {**out, "mlp_bias": False}
        quantization = {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "offline",
            "modules_to_not_convert": ["lm_head"],
        }
        return {**out, "quantization_config": quantization}


class RMSNorm(nn.Module):
    """Root mean square normalization with a gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def ternarize(w: Tensor) -> tuple[Tensor, Tensor]:
    """Ternarize with BitNet's absmean: (codes in -1, 0, 1; scale = mean|w|)."""
    scale = w.abs().mean().clamp(min=1e-5)
    return (w / scale).round().clamp(-1, 1), scale


class BitLinear(nn.Linear):
    """A linear layer with ternary weights and int8 activations; straight-through gradients."""

    frozen = False  # True once the weights are stored as ternary times a scale

    def forward(self, x: Tensor) -> Tensor:
        """Multiply with the quantized weight."""
        s = 127 / x.detach().abs().amax(-1, keepdim=True).clamp(min=1e-5)
        x = x + ((x * s).round().clamp(-128, 127) / s - x).detach()
        if self.frozen:
            return nn.functional.linear(x, self.weight)
        codes, scale = ternarize(self.weight.detach())
        return nn.functional.linear(x, self.weight + (codes * scale - self.weight).detach())


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; BitNet has an extra norm before ``o_proj``."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        linear = BitLinear if c.kind == "bitnet" else nn.Linear
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.head_dim = c.head_dim
        self.q_proj = linear(c.hidden_size, queries, bias=False)
        self.k_proj = linear(c.hidden_size, keys, bias=False)
        self.v_proj = linear(c.hidden_size, keys, bias=False)
        self.o_proj = linear(queries, c.hidden_size, bias=False)
        self.attn_sub_norm = RMSNorm(queries, c.rms_norm_eps) if c.kind == "bitnet" else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[rows, length, hidden] -> [rows, length, hidden]."""
        rows, length, _ = x.shape
        q, k, v = (
            f(x).view(rows, length, -1, self.head_dim).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (rotate(k, cos, sin), v))
        y = nn.functional.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        y = self.o_proj(self.attn_sub_norm(y.transpose(1, 2).reshape(rows, length, -1)))
        assert isinstance(y, Tensor)
        return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions, pairing the halves of a head as in transformers."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class MLP(nn.Module):
    """Gated feed-forward: SiLU for Llama, squared ReLU and a second norm for BitNet."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        linear = BitLinear if c.kind == "bitnet" else nn.Linear
        self.gate_proj = linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = linear(c.intermediate_size, c.hidden_size, bias=False)
        self.ffn_sub_norm = RMSNorm(c.intermediate_size, c.rms_norm_eps) if c.kind == "bitnet" else nn.Identity()
        self.squared = c.kind == "bitnet"

    def forward(self, x: Tensor) -> Tensor:
        """[rows, length, hidden] -> [rows, length, hidden]."""
        gate = self.gate_proj(x)
        gate = nn.functional.relu(gate).square() if self.squared else nn.functional.silu(gate)
        y = self.down_proj(self.ffn_sub_norm(gate * self.up_proj(x)))
        assert isinstance(y, Tensor)
        return y


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[rows, length, hidden] -> [rows, length, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y = x + self.mlp(self.post_attention_layernorm(x))
        assert isinstance(y, Tensor)
        return y


class Decoder(nn.Module):
    """A decoder with transformers' parameter names, so the state dict is the checkpoint (minus ``model.``)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        frequency = c.rope_theta ** -(torch.arange(0, c.head_dim, 2) / c.head_dim)
        angle = torch.outer(torch.arange(c.max_position_embeddings), frequency).repeat(1, 2)  # [position, head_dim]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                # Residual branches start small; embeddings too, because they are also the output matrix.
                small = name.endswith(("o_proj.weight", "down_proj.weight")) and c.kind == "llama"
                std = 0.02 if "embed" in name else p.shape[1] ** -0.5
                nn.init.normal_(p, std=std / math.sqrt(2 * c.num_hidden_layers) if small else std)

    def forward(self, ids: Tensor) -> Tensor:
        """[rows, length] ids -> [rows, length, vocabulary] logits."""
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return nn.functional.linear(self.norm(x), self.embed_tokens.weight)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats."""
        return nn.functional.cross_entropy(self(ids).flatten(0, 1), targets.flatten())


# ------------------------------------------------------------------------------------------------------------ training


def train(model: Decoder, stream: Tensor, starts: Tensor, held_out: list[int], args: argparse.Namespace) -> None:
    """Train with AdamW, warm-up and a cosine to zero; save a checkpoint every few minutes."""
    checkpoint = args.work / f"{args.kind}.pt"
    decay = [p for p in model.parameters() if p.ndim == 2]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": args.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    rng = torch.Generator().manual_seed(SEED)
    step, elapsed = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        rng.set_state(state["rng"])
        step, elapsed = state["step"], state["elapsed"]
        print(f"resumed at step {step}, {elapsed / 60:.1f} min", flush=True)

    loss_of = torch.compile(model.loss) if args.compile else model.loss
    began = saved = time.monotonic() - elapsed
    saved += elapsed
    running = 0.0
    for ids, targets in batches(stream, starts, args.rows, args.length, rng):
        elapsed = time.monotonic() - began
        done = step / args.steps if args.steps else elapsed / (60 * args.minutes)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / args.warmup) * (0.5 + 0.5 * math.cos(math.pi * done))
        if args.kind == "bitnet" and done > 0.5:  # as in BitNet: no weight decay in the second half
            optimizer.param_groups[0]["weight_decay"] = 0.0
        loss = loss_of(ids, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        value = loss.item()
        running = value if running == 0 else 0.98 * running + 0.02 * value
        if step % 50 == 0:
            print(
                f"step {step}  {elapsed / 60:.1f} min  loss {running:.4f}  lr {optimizer.param_groups[0]['lr']:.2e}",
                flush=True,
            )
        if time.monotonic() - saved > 60 * args.save_minutes:
            save_checkpoint(checkpoint, model, optimizer, rng, step, time.monotonic() - began)
            print(f"step {step}  held-out perplexity {math.exp(nll(model, held_out) / len(held_out)):.3f}", flush=True)
            saved = time.monotonic()
    save_checkpoint(checkpoint, model, optimizer, rng, step, elapsed)
    print(
        f"finished: {step} steps, {step * args.rows * args.length / 1e6:.2f} M tokens, {elapsed / 60:.1f} min",
        flush=True,
    )


def save_checkpoint(
    path: Path, model: Decoder, optimizer: torch.optim.Optimizer, rng: torch.Generator, step: int, elapsed: float
) -> None:
    """Replace the checkpoint atomically, so that a kill leaves the old or the new one."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": rng.get_state(),
        "step": step,
        "elapsed": elapsed,
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


@torch.no_grad()
def nll(model: Decoder, ids: list[int], length: int = 512) -> float:
    """Return the summed negative log-likelihood in nats over non-overlapping windows of 512 tokens, each after BOS."""
    total = 0.0
    for at in range(0, len(ids), length):
        window = torch.tensor([[BOS, *ids[at : at + length]]])
        total += nn.functional.cross_entropy(model(window[:, :-1])[0], window[0, 1:], reduction="sum").item()
    return total


@torch.no_grad()
def sample(
    model: Decoder, tokenizer: Tokenizer, prompt: str, seed: int, tokens: int = 70, temperature: float = 0.7
) -> str:
    """Return the prompt and a continuation sampled from the top 40 tokens."""
    rng = torch.Generator().manual_seed(seed)
    ids: list[int] = tokenizer.encode(prompt).ids
    for _ in range(tokens):
        logits = model(torch.tensor([ids]))[0, -1] / temperature
        kept = logits.topk(40)
        ids.append(int(kept.indices[torch.multinomial(kept.values.softmax(-1), 1, generator=rng)]))
        if ids[-1] == EOS:
            break
    text: str = tokenizer.decode(ids)
    return text


# -------------------------------------------------------------------------------------------------------------- export


def pack_ternary(codes: Tensor) -> Tensor:
    """[R, C] in -1, 0, 1 -> uint8 [R/4, C]: bits 2i, 2i+1 of row r store row i*R/4 + r, plus one."""
    parts = (codes + 1).to(torch.uint8).chunk(4)
    return parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6


def unpack_ternary(packed: Tensor) -> Tensor:
    """Inverse of `pack_ternary`, as float32."""
    return torch.cat([(packed >> 2 * i & 3).float() - 1 for i in range(4)])


def export(model: Decoder, config: Config, tokenizer: Tokenizer, out: Path) -> None:
    """Write a Hugging Face folder."""
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, p in model.state_dict().items():
        if config.kind == "bitnet" and name.endswith("_proj.weight"):
            codes, scale = ternarize(p)
            tensors[f"model.{name}"] = pack_ternary(codes).contiguous()
            tensors[f"model.{name}_scale"] = scale.reshape(1).bfloat16()
        else:
            tensors[f"model.{name}"] = p.bfloat16().contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    names = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    write_json(out / "config.json", config.to_json())
    write_json(out / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD})
    write_json(
        out / "tokenizer_config.json",
        {
            **names,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embeddings,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON, indented, with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def load_exported(config: Config, folder: Path) -> Decoder:
    """Load the exported folder as a float32 model, so that the shipped files are evaluated."""
    tensors = load_file(folder / "model.safetensors")
    state: dict[str, Tensor] = {}
    for name, t in tensors.items():
        short = name.removeprefix("model.")
        if t.dtype == torch.uint8:
            state[short] = unpack_ternary(t) * tensors[f"{name}_scale"].float()
        elif not name.endswith("_scale"):
            state[short] = t.float()
    model = Decoder(config).eval()
    model.load_state_dict(state)
    for module in model.modules():
        if isinstance(module, BitLinear):
            module.frozen = True
    return model


def check_with_transformers(model: Decoder, folder: Path, ids: list[int]) -> str:
    """Return the largest logit difference from transformers in float32, on one window."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        return "transformers is not installed: no comparison"
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    nn.Module.float(peer)  # transformers 5.23 leaves part of a BitNet in bfloat16, and its own float() raises
    window = torch.tensor([[BOS, *ids[:255]]])
    with torch.no_grad():
        ours, reference = model(window), peer(window).logits
    prompt = AutoTokenizer.from_pretrained(folder)(PROMPTS[0])["input_ids"]
    if prompt[0] != BOS:
        raise SystemExit("transformers' tokenizer does not prepend BOS")
    same = (ours.argmax(-1) == reference.argmax(-1)).float().mean().item()
    return f"largest logit difference {(ours - reference).abs().max().item():.2e}, same first choice {same:.1%}"


def report(config: Config, tokenizer: Tokenizer, folder: Path, held_out: str) -> None:
    """Print the figures quoted in the README of the demo folder."""
    model = load_exported(config, folder)
    ids = encode(tokenizer, held_out)
    nats = nll(model, ids)
    count, size = sum(p.numel() for p in model.parameters()), (folder / "model.safetensors").stat().st_size
    print(f"{config.kind}: {count} parameters, {size} bytes")
    print(f"held-out: {len(ids)} tokens, {len(held_out.encode())} bytes")
    print(
        f"perplexity per token {math.exp(nats / len(ids)):.4f}, per byte {math.exp(nats / len(held_out.encode())):.4f}"
    )
    for n, prompt in enumerate(PROMPTS):
        print(f"sample {n + 1}: {sample(model, tokenizer, prompt, seed=SEED + n)!r}")
    print("transformers:", check_with_transformers(model, folder, ids))


def main() -> None:
    """Read the text, train, export and evaluate."""
    here = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("kind", choices=("llama", "bitnet"))
    parser.add_argument("--text", type=Path, help="a file of 'Ge1:1 text' lines; default: call the bible program")
    parser.add_argument("--out", type=Path, default=here / "src/polyquant/demo", help="the demo folder")
    parser.add_argument("--work", type=Path, default=here / "build/demo-training", help="checkpoints")
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the schedule in minutes")
    parser.add_argument("--steps", type=int, default=0, help="length of the schedule in steps, instead of --minutes")
    parser.add_argument("--rows", type=int, default=4, help="windows per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per window")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--save-minutes", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="torch.compile; needs a C++ compiler")
    parser.add_argument("--export-only", action="store_true", help="skip training, export the checkpoint")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)

    config = Config(args.kind)
    books, held_out = split_text(read_source(args.text))
    (args.out / "held-out.txt").write_text(held_out, encoding="utf-8")
    tokenizer = train_tokenizer(books, config.vocab_size)
    stream = torch.tensor(np.concatenate([[*encode(tokenizer, book), EOS] for book in books]))
    newline = encode(tokenizer, "\n")[0]
    starts = (stream[: -args.length - 1] == newline).nonzero().flatten() + 1
    starts = starts[stream[starts] != newline]
    model = Decoder(config)
    count = sum(p.numel() for p in model.parameters())
    print(f"{args.kind}: {count} parameters, {len(stream)} training tokens, {len(held_out)} held-out bytes", flush=True)

    if args.export_only:
        model.load_state_dict(torch.load(args.work / f"{args.kind}.pt", weights_only=True)["model"])
    else:
        train(model, stream, starts, encode(tokenizer, held_out), args)
    export(model, config, tokenizer, args.out / args.kind)
    report(config, tokenizer, args.out / args.kind, held_out)


if __name__ == "__main__":
    main()
