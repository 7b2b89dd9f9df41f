"""Write tiny random models, llama.cpp's conversions and transformers' logits to tests/vectors/architectures/NAME.

    PYTHONPATH=src python scripts/make_tiny_models.py LLAMA_CPP_DIR NAME...        default: all of tiny_models.TINY

Needs torch, transformers, safetensors, and the requirements of llama.cpp's convert_hf_to_gguf.py. The seed of the
weights is the CRC of the name; norms and biases are random too, so that every tensor matters. For architectures whose
code is only on the hub, an equivalent class of transformers is used.

The converter identifies pre-tokenizers by a hash of the vocabulary and needs SentencePiece for some models; here all
models have one byte-level tokenizer, declared as `gpt-2`.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from architecture_vectors import write
from tiny_models import TINY, Tiny

VECTORS = Path(__file__).resolve().parent.parent / "tests" / "vectors" / "architectures"
TOKENIZER = VECTORS / "llama3"
TOKENS = 24
DROPPED = ("dtype", "rope_parameters", "layer_types_validation")


def randomise(model: Any, seed: int) -> None:
    """Set random norms around one, biases around zero and scale-preserving matrices, rounded to bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if re.search(r"(norm|ln_?\w?)\w*\.weight$", name):
                value = 1 + 0.25 * noise
            elif name.endswith("bias"):
                value = 0.2 * noise
            elif "embed" in name:
                value = 0.25 * noise
            else:
                sharp = 1.5 if re.search(r"[qk]_proj", name) else 1.0
                value = noise * sharp / weight.shape[-1] ** 0.5
            weight.copy_(value.to(torch.bfloat16).float())


def logits_of(model: Any, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return {"tokens": [24], "hf_torch": [24, vocab]} in float32."""
    vocab = model.config.get_text_config().vocab_size
    tokens = np.random.default_rng(seed).integers(3, vocab, TOKENS).astype(np.int32)
    with torch.no_grad():
        out = model.eval()(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    return {"tokens": tokens, "hf_torch": out.numpy()}


def hub_style(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a config.json of transformers 5 to the keys of version 4, which most models on the hub use."""
    rope = dict(config.get("rope_parameters") or {})
    out = {k: v for k, v in config.items() if k not in DROPPED}
    out["torch_dtype"] = "bfloat16"
    if "rope_theta" in rope:
        out["rope_theta"] = rope.pop("rope_theta")
    rope.pop("partial_rotary_factor", None)
    if rope.get("rope_type", "default") != "default":
        out["rope_scaling"] = rope
    return out


def make(tiny: Tiny, folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Write the Hugging Face folder of a model; return its outputs."""
    seed = zlib.crc32(tiny.name.encode())
    config = getattr(transformers, tiny.config_class)(**tiny.sizes)
    config._attn_implementation = "eager"
    model = getattr(transformers, tiny.model_class)(config)
    randomise(model, seed)
    outputs = logits_of(model, seed)
    folder.mkdir()
    if tiny.checkpoint is None:
        model.to(torch.bfloat16).save_pretrained(folder)
        entries = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        entries = hub_style(entries) if tiny.hub_style else entries
    else:
        tensors = tiny.checkpoint({k: v.detach().to(torch.bfloat16) for k, v in model.state_dict().items()}, config)
        save_file(
            {k: v.contiguous().clone() for k, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
        )
        entries = {}
    entries = {k: v for k, v in {**entries, **tiny.added}.items() if k not in tiny.removed}
    (folder / "config.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    return outputs


def convert(llama_cpp: Path, hf: Path, gguf: Path, tiny: Tiny) -> None:
    """Run llama.cpp's converter on a folder."""
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import convert_hf_to_gguf
    from conversion.base import ModelBase, TextModel

    config = json.loads((hf / "config.json").read_text(encoding="utf-8"))
    kind = convert_hf_to_gguf.get_model_class(config["architectures"][0])
    kind.set_vocab = lambda self: self._set_vocab_gpt2()
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    usual = ModelBase.__dict__["load_hparams"]
    if tiny.plain_config:
        ModelBase.load_hparams = staticmethod(lambda folder, is_mistral_format: dict(config))
    if tiny.name == "baichuan":  # its own method recurses endlessly if a tensor keeps its rows
        own = kind.modify_tensors
        kind.modify_tensors = lambda self, data, name, bid: (
            own if name.endswith("W_pack.weight") else TextModel.modify_tensors
        )(self, data, name, bid)
    sys.argv = ["convert_hf_to_gguf.py", str(hf), "--outfile", str(gguf), "--outtype", tiny.outtype]
    convert_hf_to_gguf.main()
    ModelBase.load_hparams = usual
    del sys.path[:2]


def main() -> None:
    """Parse arguments and write the models."""
    llama_cpp, *names = sys.argv[1:]
    for name in names or TINY:
        tiny = TINY[name]
        with tempfile.TemporaryDirectory() as work:
            hf, gguf, logits = Path(work) / name, Path(work) / "model.gguf", Path(work) / "logits.npz"
            outputs = make(tiny, hf)
            np.savez(logits, **outputs)
            convert(Path(llama_cpp).resolve(), hf, gguf, tiny)
            write(hf, gguf, logits, VECTORS / name)
        size = sum(p.stat().st_size for p in (VECTORS / name).iterdir())
        print(f"{name}: {size / 1000:.0f} KB, logits {outputs['hf_torch'].std():.2f}")


if __name__ == "__main__":
    main()
