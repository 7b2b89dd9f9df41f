"""Print a Markdown table of the perplexity of the demonstration models in every format.

    python bench/perplexity.py [GGUF ...] [--tokens N]

Each format is converted from the embedded model and evaluated on the held-out text: windows of BOS and 511 tokens,
every token scored. Files passed as arguments are added as rows; they must contain the Llama demonstration model. If
llama-cpp-python is installed, its perplexity on the same windows is shown too.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import polyquant as pq
from polyquant.analysis.demo import demo_model
from polyquant.analysis.evaluate import Evaluation

LLAMA = (
    "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_1", "q5_0", "q4_k_m", "q4_1", "q4_0", "iq4_nl", "iq4_xs",
    "mxfp4", "q3_k_m", "q2_k",
)  # fmt: skip
BITNET = ("i2_s.x86", "i2_s.arm", "tq1_0", "tq2_0")
WINDOW = 512


def made(folder: Path) -> Iterator[tuple[str, str, Path, str | None]]:
    """Yield (model, format, path, ternary layout) for each row."""
    yield "llama", "folder, bf16", demo_model("llama"), None
    for recipe in LLAMA:
        path = folder / f"llama-{recipe}.gguf"
        pq.convert(demo_model("llama"), path, recipe=recipe, measure=False)
        yield "llama", f"GGUF {recipe}", path, None
    yield "bitnet", "folder, packed", demo_model("bitnet"), None
    for codec in BITNET:
        path = folder / f"bitnet-{codec}.gguf"
        pq.convert(demo_model("bitnet"), path, codec=codec, measure=False)
        yield "bitnet", f"GGUF {codec}", path, codec if codec.startswith("i2_s") else None


def by_llama_cpp(path: Path, text: Path, tokens: int) -> float | None:
    """Return llama.cpp's perplexity on the same windows; None if it cannot read the file or is not installed."""
    if path.is_dir() or find_spec("llama_cpp") is None:
        return None
    from llama_cpp import Llama

    try:
        model = Llama(str(path), n_ctx=WINDOW, n_batch=WINDOW, logits_all=True, verbose=False)
    except ValueError:
        return None
    ids = model.tokenize(text.read_bytes(), add_bos=False)[:tokens]
    nats = 0.0
    for a in range(0, len(ids), WINDOW - 1):
        window = [model.token_bos(), *ids[a : a + WINDOW - 1]]
        model.reset()
        model.eval(window)
        logits = np.array(model.scores[: len(window) - 1], np.float64)
        top = logits.max(-1, keepdims=True)
        total = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
        nats += float((total - logits[np.arange(len(logits)), window[1:]]).sum())
    return float(np.exp(nats / len(ids)))


def row(name: str, evaluation: Evaluation, peer: float | None) -> str:
    """Return one line of the table."""
    model, against = evaluation.model, evaluation.divergence
    cells = [
        name,
        f"{model.nbytes:,}",
        f"{model.bpw:.3f}",
        f"{model.perplexity.value:.3f}",
        "" if peer is None else f"{peer:.3f}",
    ]
    if against is None:
        cells += ["", "", ""]
    else:
        cells += [
            f"{round(np.expm1(against.log_ratio.value), 4) + 0.0:+.2%} ± {100 * against.log_ratio.error:.2f}",
            f"{against.kl.value:.5f}",
            f"{against.top_1.value:.2%}",
        ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table row by row."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("files", nargs="*", type=Path)
    arguments.add_argument("--tokens", type=int, default=16 * (WINDOW - 1))
    options = arguments.parse_args()
    text = demo_model("llama").parent / "held-out.txt"
    print(
        "| model | bytes of tensors | bits per weight | perplexity | llama.cpp's | against the folder | mean KL | same "
        "first choice |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        rows = [*made(Path(folder)), *(("llama", f"GGUF {path.stem}", path, None) for path in options.files)]
        for model, name, path, layout in rows:
            source = demo_model(model)
            found = pq.evaluate(
                path,
                text=text,
                against=None if path == source else source,
                stride=WINDOW - 1,
                tokens=options.tokens,
                ternary_layout=layout,
            )
            print(row(f"{model}, {name}", found, by_llama_cpp(path, text, options.tokens)), flush=True)


if __name__ == "__main__":
    main()
