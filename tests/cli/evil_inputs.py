"""Files whose names and values contain terminal control sequences: a table of name -> function that writes one."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

from cli.bad_inputs import GGUF, SETTINGS, SOUND, Maker, model, saved
from cli.bad_models import tensors
from folders import safetensors_bytes
from formats.gguf_files import ARCH, array, entry, file, tensor, text
from polyquant.formats.gguf.edit import edit
from polyquant.types import Kind, Meta

EVIL = "a\x1b]0;owned\x07\x1b[2J\x9b31m\r\n\x08\x7f\u202eb\u2066\u2028\u200e[/red][bold]"
"""Window title, screen clear, colours, carriage return, newline, bidi overrides, line separator, rich markup."""
NAME = EVIL.replace("/", "")
LONG = EVIL * 1000


def evil_settings(value: Any) -> dict[str, Maker]:
    return {f"{file} {key}": model(file, lambda body, key=key: body.update({key: value})) for file, key in SETTINGS}


def named_model(folder: Path) -> Path:
    """A file of a model that runs, under an evil name."""
    target = folder / f"{NAME}.gguf"
    shutil.copy(GGUF, target)
    return target


def named_folder(folder: Path) -> Path:
    return shutil.copytree(SOUND, folder / NAME)


def running_gguf(folder: Path) -> Path:
    """A working model with malicious extra metadata and a malicious chat template."""
    template = "{{ raise_exception(messages[0].role ~ '" + EVIL.replace("\n", "\\n") + "') }}"
    values = {"general.name": EVIL, f"x.{EVIL}": EVIL, "tokenizer.chat_template": template}
    edit(GGUF, folder / "x.gguf", set={k: Meta(Kind.STRING, v) for k, v in values.items()})
    return folder / "x.gguf"


def renamed(old: str, new: str) -> Maker:
    return tensors(lambda found: found.update({new: found.pop(old)}))


def sharded(folder: Path) -> Path:
    """An index whose tensors, shards and metadata are evil."""
    (folder / "config.json").write_bytes((SOUND / "config.json").read_bytes())
    body = {"weight_map": {EVIL: f"{NAME}.safetensors"}, "metadata": {EVIL: EVIL}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(body))
    (folder / f"{NAME}.safetensors").write_bytes(safetensors_bytes({EVIL * 2: ("F32", [4], bytes(16))}, {EVIL: EVIL}))
    return folder


def description(folder: Path) -> Path:
    """An msModelSlim folder whose types are evil."""
    target = shutil.copytree(SOUND, folder / "model")
    (target / "quant_model_description.json").write_text(
        json.dumps({"model_quant_type": EVIL, EVIL: EVIL, "model.embed_tokens.weight": EVIL})
    )
    return target


def gguf(*entries: bytes, tensors: tuple[bytes, ...] = (), data: bytes = b"") -> Maker:
    return saved("x.gguf", file(list(entries), list(tensors), data))


TEMPLATE = "{{ raise_exception('" + EVIL.replace("\n", "\\n").replace("\r", "\\r") + "') }}"
EVIL_INPUTS: dict[str, Maker] = {
    "gguf architecture": gguf(text("general.architecture", EVIL), text(f"{EVIL}.block_count", EVIL)),
    "gguf long architecture": gguf(text("general.architecture", LONG)),
    "gguf keys": gguf(ARCH, text(EVIL, EVIL), text(LONG[:60_000], LONG), array(f"b{EVIL}", 8, [EVIL] * 9)),
    "gguf key no UTF-8": gguf(ARCH, text(b"\xff\x1b[2J\xed\xa0\x80", b"\xff\x1b[2J")),
    "gguf value no UTF-8": gguf(ARCH, text("x", b"\xff\x1b[2J\x9b"), entry(EVIL, 99, b"")),
    "gguf bad array": gguf(ARCH, entry(EVIL, 9, struct.pack("<IQ", 8, 1 << 40))),
    "gguf key twice": gguf(ARCH, text(EVIL, EVIL), text(EVIL, EVIL)),
    "gguf tensors": gguf(ARCH, tensors=(tensor(EVIL, (4,), 0, 0), tensor(f"{EVIL}2", (4,), 0, 32)), data=bytes(64)),
    "gguf tensor overlap": gguf(ARCH, tensors=(tensor(EVIL, (16,), 0, 0), tensor("b", (16,), 0, 0)), data=bytes(64)),
    "gguf tensor type": gguf(ARCH, tensors=(tensor(EVIL, (4,), 77, 0),), data=bytes(64)),
    "gguf tensor beyond": gguf(ARCH, tensors=(tensor(EVIL, (4,), 0, 1 << 40),), data=bytes(64)),
    "gguf tensor twice": gguf(ARCH, tensors=(tensor(EVIL, (4,), 0, 0), tensor(EVIL, (4,), 0, 32)), data=bytes(64)),
    "gguf long tensor": gguf(ARCH, tensors=(tensor(LONG[:4000], (4,), 0, 0),), data=bytes(64)),
    "gguf tensor no UTF-8": gguf(ARCH, tensors=(tensor(b"\xff\x1b[2J", (4,), 0, 0),), data=bytes(64)),
    "gguf NaN": gguf(ARCH, tensors=(tensor(EVIL, (4, 2), 0, 0),), data=b"\xff" * 32),
    "gguf tokenizer": gguf(ARCH, text("tokenizer.ggml.model", EVIL), text("tokenizer.ggml.pre", EVIL)),
    "running gguf": running_gguf,
    "file name": named_model,
    "folder name": named_folder,
    "missing": lambda folder: folder / f"{NAME}.gguf",
    "hf tensors": renamed("model.norm.weight", EVIL),
    "hf layer": renamed("model.layers.0.mlp.up_proj.weight", f"model.layers.0.{EVIL}.weight"),
    "hf long tensor": renamed("model.norm.weight", LONG),
    "hf dtype": saved("x.safetensors", safetensors_bytes({EVIL: (EVIL, [4], bytes(16))}, {EVIL: EVIL})),
    "hf shape": saved("x.safetensors", safetensors_bytes({EVIL: ("F32", [5], bytes(16))})),
    "hf shards": sharded,
    "hf description": description,
    "hf template": model("tokenizer_config.json", lambda c: c.update(chat_template=TEMPLATE)),
    "hf templates": model(
        "tokenizer_config.json", lambda c: c.update(chat_template=[{"name": EVIL, "template": EVIL}])
    ),
    "hf template syntax": model("tokenizer_config.json", lambda c: c.update(chat_template="{% " + EVIL)),
    "hf tokenizer type": model("tokenizer.json", lambda t: t["model"].update(type=EVIL)),
    "hf tokens": model("tokenizer.json", lambda t: t["model"].update(vocab={EVIL: 0, f"{EVIL}2": 0})),
    "hf added": model("tokenizer.json", lambda t: t.update(added_tokens=[{"id": 0, "content": EVIL, "special": True}])),
    "hf decoder": model("tokenizer.json", lambda t: t.update(decoder={"type": EVIL})),
    "hf method": model("config.json", lambda c: c.update(quantization_config={"quant_method": EVIL, EVIL: EVIL})),
    "hf rope": model("config.json", lambda c: c.update(rope_scaling={"rope_type": EVIL, "type": EVIL, "factor": EVIL})),
    "hf unknown key": model("config.json", lambda c: c.update({EVIL: EVIL, "torch_dtype": EVIL, "hidden_act": EVIL})),
    "hf JSON": model("config.json", b'{"a": "\x1b[2J"}'),
    "hf keys twice": model("config.json", ('{"%s": 1, "%s": 1}' % ((json.dumps(EVIL)[1:-1],) * 2)).encode()),
    "hf surrogates": model("config.json", b'{"model_type": "\\ud800\\u001b[2J", "architectures": ["\\udfff"]}'),
    **evil_settings(EVIL),
    **{f"list of {k}": v for k, v in evil_settings([EVIL]).items()},
    **{f"map of {k}": v for k, v in evil_settings({EVIL: EVIL, "type": EVIL}).items()},
}
