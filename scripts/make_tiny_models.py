"""Tiny random-weight models of architectures, what the real converter makes of them, and the logits of transformers: tests/vectors/architectures/NAME.

    PYTHONPATH=src python scripts/make_tiny_models.py LLAMA_CPP_DIR NAME...        all of tiny_models.TINY without a name

Needs torch, transformers, safetensors, and what llama.cpp's convert_hf_to_gguf.py needs. Weights come from a seed that is the CRC of the name; norms and biases are random
too, so that every tensor matters. Checkpoints of code that lives on the hub alone have a twin: a class of transformers that computes the same.

The converter knows pre-tokenizers by a hash of the vocabulary and reads SentencePiece for some models; here all have one byte-level tokenizer, said to be `gpt-2`.
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
    """Norms around one, biases around zero, matrices so that the activations keep their size; all rounded to bfloat16."""
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
    """{"tokens": [24], "hf_torch": [24, vocab]} in float32."""
    vocab = model.config.get_text_config().vocab_size
    tokens = np.random.default_rng(seed).integers(3, vocab, TOKENS).astype(np.int32)
    with torch.no_grad():
        out = model.eval()(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    return {"tokens": tokens, "hf_torch": out.numpy()}


def hub_style(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of transformers 5 in the words of 4, as nearly all on the hub are."""
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
    """The Hugging Face folder of a model; what it computes."""
    seed = zlib.crc32(tiny.name.encode())
    config = getattr(transformers, tiny.config_class)(**tiny.sizes)
    config._attn_implementation = "eager"
    model = getattr(transformers, tiny.model_class)(config)
    randomise(model, seed)
    found = logits_of(model, seed)
    folder.mkdir()
    if tiny.checkpoint is None:
        model.to(torch.bfloat16).save_pretrained(folder)
        said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        said = hub_style(said) if tiny.hub_style else said
    else:
        tensors = tiny.checkpoint({k: v.detach().to(torch.bfloat16) for k, v in model.state_dict().items()}, config)
        save_file(
            {k: v.contiguous().clone() for k, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
        )
        said = {}
    said = {k: v for k, v in {**said, **tiny.said}.items() if k not in tiny.unsaid}
    (folder / "config.json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    return found


def convert(llama_cpp: Path, hf: Path, gguf: Path, tiny: Tiny) -> None:
    """The real converter on a folder."""
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
    if tiny.name == "baichuan":  # its own method calls itself for ever where a tensor keeps its rows
        own = kind.modify_tensors
        kind.modify_tensors = lambda self, data, name, bid: (
            own if name.endswith("W_pack.weight") else TextModel.modify_tensors
        )(self, data, name, bid)
    sys.argv = ["convert_hf_to_gguf.py", str(hf), "--outfile", str(gguf), "--outtype", tiny.outtype]
    convert_hf_to_gguf.main()
    ModelBase.load_hparams = usual
    del sys.path[:2]


def main() -> None:
    """See above."""
    llama_cpp, *names = sys.argv[1:]
    for name in names or TINY:
        tiny = TINY[name]
        with tempfile.TemporaryDirectory() as work:
            hf, gguf, logits = Path(work) / name, Path(work) / "model.gguf", Path(work) / "logits.npz"
            found = make(tiny, hf)
            np.savez(logits, **found)
            convert(Path(llama_cpp).resolve(), hf, gguf, tiny)
            write(hf, gguf, logits, VECTORS / name)
        size = sum(p.stat().st_size for p in (VECTORS / name).iterdir())
        print(f"{name}: {size / 1000:.0f} KB, logits {found['hf_torch'].std():.2f}")


if __name__ == "__main__":
    main()
