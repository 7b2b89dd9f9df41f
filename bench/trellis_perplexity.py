"""Trellis codes against ggml's K-quants on the demonstration model: `python bench/trellis_perplexity.py [--effort E] [--calibration FILE] [--tokens N]`
(`--quants q2_k q4_k`, `--bits 3`: only those rows).

Only the matrices of linear layers are quantized, the embedding stays bfloat16 everywhere; every byte of the quantized matrices counts. Each K-quant
stands beside Trellis folders of the same effective bits (--target-bpw), both without and with calibration (importance matrix, LDLQ), on the same text:
one that the model wrote itself, unless a file is named. Perplexity and divergence on the held-out text, which no method has seen: windows of BOS and
511 tokens, every token scored, activations not rounded.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import polyquant as pq
from polyquant.analysis.demo import demo_model
from polyquant.calibration.hessians import Hessians
from polyquant.calibration.stages import OWN_TEXT, calibration_stages
from polyquant.conversion.convert import plan
from polyquant.conversion.steps import Plan
from polyquant.types import F32

MODEL = demo_model("llama")
K_QUANTS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
WINDOW = 512
FLOAT_EMBEDDING = ("token_embd.weight=bf16",)


def own_text(folder: Path) -> Path:
    """Text that the model writes, as a file: so it is written once."""
    from polyquant.calibration.stages import calibration_windows
    from polyquant.runtime.load import load

    model = load(MODEL)
    windows = calibration_windows(model, OWN_TEXT)
    path = folder / "own-text.txt"
    path.write_text("\n".join(model.tokenizer.decode(w[1:].tolist()) for w in windows), encoding="utf-8")
    return path


def importance(text: Path) -> dict[str, F32]:
    """The importance matrix of that text, by GGUF tensor name: the diagonals of the Hessians."""
    made = plan(MODEL, "gguf", codec="q8_0")
    sources = {s.map.source: s.map.target for s in made.steps if len(s.map.shape) == 2}
    hessians = Hessians(calibration_stages(MODEL, str(text)), sources)
    return {
        sources[name]: np.maximum(np.diagonal(h), 1e-20).astype(np.float32)
        for name in sorted(sources, key=hessians.order)
        if (h := hessians.of(name)[0]) is not None
    }


def plans(text: Path, effort: str, names: list[str], widths: list[int]) -> Iterator[tuple[str, Plan]]:
    """(row, plan): K-quants and what stands beside them, then Trellis folders of one width."""
    matrix = importance(text)
    for name in names:
        yield name, plan(MODEL, "gguf", codec=name, rules=FLOAT_EMBEDDING)
        imatrix = plan(MODEL, "gguf", codec=name, rules=FLOAT_EMBEDDING, importance=matrix)
        yield f"{name}, importance", imatrix
        size = imatrix.quantized_bpw
        yield "trellis, viterbi", plan(MODEL, "trellis-v3", target_bpw=size, effort=effort)
        yield "trellis, ldlq", plan(MODEL, "trellis-v3", target_bpw=size, effort=effort, calibration=text)
    for bits in widths:
        yield f"trellis {bits}, viterbi", plan(MODEL, "trellis-v3", bits=bits, effort=effort)
        yield f"trellis {bits}, ldlq", plan(MODEL, "trellis-v3", bits=bits, effort=effort, calibration=text)


def row(name: str, made: Plan, path: Path, tokens: int) -> str:
    """One line of the table."""
    found = pq.evaluate(
        path,
        text=MODEL.parent / "held-out.txt",
        against=MODEL,
        stride=WINDOW - 1,
        tokens=tokens,
        activations="float",
    )
    against = found.divergence
    assert against is not None
    change = float(np.expm1(against.log_ratio.value))
    cells = [
        name, f"{made.quantized_bpw:.3f}", f"{found.model.perplexity.value:.3f}",
        f"{change:+.2%} ± {100 * against.log_ratio.error:.2f}",
        f"{against.kl.value:.5f}", f"{against.top_1.value:.2%}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table, a row at a time."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--effort", choices=["fast", "default", "max"], default="default")
    arguments.add_argument("--calibration", type=Path, help="a text; by default one that the model writes")
    arguments.add_argument("--tokens", type=int, default=16 * (WINDOW - 1))
    arguments.add_argument("--quants", nargs="*", choices=K_QUANTS, default=list(K_QUANTS))
    arguments.add_argument(
        "--bits", nargs="*", type=int, default=[2, 3, 4, 5], help="widths of the folders of one width"
    )
    options = arguments.parse_args()
    print("| linear layers | bits per weight | perplexity | against float | mean KL | same first choice |")
    print("|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = options.calibration or own_text(folder)
        for i, (label, made) in enumerate(plans(text, options.effort, options.quants, options.bits)):
            path = folder / (f"{i}.gguf" if made.format == "gguf" else str(i))
            pq.convert(made, path, measure=False)
            print(row(label, made, path, options.tokens), flush=True)


if __name__ == "__main__":
    main()
