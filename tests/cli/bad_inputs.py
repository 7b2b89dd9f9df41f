"""Bad input written by hand: a table of name -> function that writes it to a folder and returns the path to open."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from folders import raw_safetensors, safetensors_bytes
from formats.gguf_files import ARCH, array, entry, file, sound, string, tensor, text, u32
from golden import VECTORS

Maker = Callable[[Path], Path]
SOUND = VECTORS / "models/tiny-llama-tied/hf"
GGUF = VECTORS / "models/tiny-llama-tied/tiny-llama-tied-Q4_0.gguf"


def saved(name: str, raw: Callable[[], bytes] | bytes) -> Maker:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(raw if isinstance(raw, bytes) else raw())
        return folder / name

    return make


def sparse(name: str, head: bytes, size: int) -> Maker:
    """A sparse file of the declared size."""

    def make(folder: Path) -> Path:
        with (folder / name).open("wb") as f:
            f.write(head)
            f.truncate(size)
        return folder / name

    return make


def model(name: str, change: Callable[[Any], Any] | bytes) -> Maker:
    """Return a valid folder with a small file replaced, or its JSON modified in place (or replaced by the result)."""

    def make(folder: Path) -> Path:
        target = folder / "model"
        shutil.copytree(SOUND, target)
        if isinstance(change, bytes):
            (target / name).write_bytes(change)
        else:
            body = json.loads((target / name).read_text()) if (target / name).exists() else {}
            body = change(body) or body
            (target / name).write_text(json.dumps(body))
        return target

    return make


def setting(**values: Any) -> Maker:
    return model("config.json", lambda c: c.update(values))


def index(weight_map: Any, **shards: bytes) -> Maker:
    def make(folder: Path) -> Path:
        (folder / "config.json").write_bytes((SOUND / "config.json").read_bytes())
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        for name, raw in shards.items():
            (folder / f"{name}.safetensors").write_bytes(raw)
        return folder

    return make


def linked_out(folder: Path) -> Path:
    """A shard that is a link to a non-weight file."""
    shutil.copytree(SOUND, folder / "model")
    (folder / "model/model.safetensors").unlink()
    (folder / "model/model.safetensors").symlink_to("/etc/passwd")
    return folder / "model"


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "x.gguf")
    return folder / "x.gguf"


def fifo_inside(folder: Path) -> Path:
    shutil.copytree(SOUND, folder / "model")
    (folder / "model/tokenizer.json").unlink()
    os.mkfifo(folder / "model/tokenizer.json")
    return folder / "model"


def linked_loop(folder: Path) -> Path:
    (folder / "x.gguf").symlink_to(folder / "x.gguf")
    return folder / "x.gguf"


def cut(source: Path, at: float) -> Maker:
    return saved(f"cut{source.suffix}", lambda: source.read_bytes()[: int(at * source.stat().st_size)])


def nested(depth: int) -> bytes:
    return file(
        [ARCH, string("x") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 0)]
    )


def full(member: str) -> bytes:
    """A header with as many members as the limits of 16 MB and 620,000 values allow."""
    n = min(15_900_000 // (len(member) + 5), 610_000 // (member.count(",") + member.count("{") + member.count("[")))
    return raw_safetensors("{" + "".join(member % i for i in range(n)) + '"x":0}')


F32 = ("F32", [4], bytes(16))
HUGE = 10**12

UNUSABLE: dict[str, Maker] = {
    "missing": lambda folder: folder / "nothing.gguf",
    "empty": saved("x.gguf", b""),
    "one byte": saved("x.gguf", b"G"),
    "noise": saved("x.gguf", bytes(range(256)) * 40),
    "folder": lambda folder: folder,
    "fifo": fifo,
    "fifo in a folder": fifo_inside,
    "device": lambda folder: Path("/dev/zero"),
    "link to itself": linked_loop,
    "name too long": lambda folder: folder / ("x" * 300),
    **{f"gguf cut at {at:.2%}": cut(GGUF, at) for at in (0.00001, 0.00005, 0.001, 0.01, 0.05, 0.5, 0.99)},
    **{f"safetensors cut at {at:.2%}": cut(SOUND / "model.safetensors", at) for at in (0.00001, 0.0005, 0.5, 0.9999)},
    "gguf version": saved("x.gguf", b"GGUF" + struct.pack("<IQQ", 99, 0, 0)),
    "gguf many keys": saved("x.gguf", file([ARCH], n_keys=1 << 60)),
    "gguf many tensors": saved("x.gguf", file([ARCH], n_tensors=HUGE)),
    "gguf array claim": saved("x.gguf", file([ARCH, entry("x", 9, struct.pack("<IQ", 4, HUGE))])),
    "gguf string claim": saved("x.gguf", file([ARCH, entry("x", 8, struct.pack("<Q", 1 << 63))])),
    "gguf string array claim": saved("x.gguf", file([ARCH, entry("x", 9, struct.pack("<IQ", 8, HUGE))])),
    "gguf nested 1000": saved("x.gguf", nested(1000)),
    "gguf elements": saved("x.gguf", file([ARCH], [tensor("a", (HUGE, 1), 0, 0)], bytes(64))),
    "gguf product overflow": saved("x.gguf", file([ARCH], [tensor("a", (1 << 32, 1 << 32), 0, 0)], bytes(64))),
    "gguf product is zero mod 2^64": saved("x.gguf",
        file([ARCH], [tensor("a", (1 << 31, 1 << 31, 4), 0, 0)], bytes(64))),
    "gguf offset overflow": saved("x.gguf", file([ARCH], [tensor("a", (4,), 0, (1 << 64) - 32)], bytes(64))),
    "gguf huge alignment": saved("x.gguf",
        file([ARCH, u32("general.alignment", 1 << 31)], [tensor("a", (4,), 0, 0)], bytes(64))),
    "gguf alignment 3": saved("x.gguf",
        file([ARCH, u32("general.alignment", 3)], [tensor("a", (4,), 0, 0)], bytes(64))),
    "gguf alignment 0": saved("x.gguf",
        file([ARCH, u32("general.alignment", 0)], [tensor("a", (4,), 0, 0)], bytes(64))),
    "gguf name no UTF-8": saved("x.gguf", file([ARCH], [tensor(b"\xff\xfe", (4,), 0, 0)], bytes(64))),
    "gguf key no UTF-8": saved("x.gguf", file([text(b"\xff", "x")])),
    "gguf key twice": saved("x.gguf", file([ARCH, ARCH])),
    "gguf overlap": saved("x.gguf", file([ARCH], [tensor("a", (8,), 0, 0), tensor("b", (8,), 0, 0)], bytes(64))),
    "safetensors header over 100 MB": sparse("x.safetensors", struct.pack("<Q", 100_000_001) + b'{"', 110_000_000),
    "safetensors header at the limit": sparse("x.safetensors", struct.pack("<Q", 16_000_000) + b'{"', 16_000_100),
    "safetensors many tensors": saved("x.safetensors",
        lambda: full('"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},')),
    "safetensors many objects": saved("x.safetensors", lambda: full('"%d":{"":0},')),
    "safetensors one long name": saved("x.safetensors", lambda: raw_safetensors(b'{"' + b"a" * 15_900_000 + b'":1}')),
    "safetensors one long escaped name": saved("x.safetensors",
        lambda: raw_safetensors(b'{"' + b"\\u4e2d" * 2_300_000 + b'":1}')),
    "safetensors wide characters": saved("x.safetensors",
        lambda: raw_safetensors(b'{"\xf0\x9f\x98\x80' + b"a" * 15_900_000 + b'":1}')),
    "safetensors many brackets": saved("x.safetensors", lambda: raw_safetensors(b'{"a":' + b"[]," * 4_500_000 + b"1}")),
    "safetensors length overflow": saved("x.safetensors", b"\xff" * 8 + b'{"a":1}'),
    "safetensors duplicate": saved("x.safetensors",
        raw_safetensors('{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}')),
    "safetensors nested 1000": saved("x.safetensors", raw_safetensors('{"a":' + "[" * 1000 + "]" * 1000 + "}")),
    "safetensors elements": saved("x.safetensors",
        raw_safetensors('{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}')),
    "safetensors product overflow": saved("x.safetensors",
        raw_safetensors('{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}')),
    "safetensors unknown dtype of many": saved("x.safetensors",
        raw_safetensors('{"a":{"dtype":"X","shape":[1000000000000],"data_offsets":[0,8]}}', bytes(8))),
    "safetensors not UTF-8": saved("x.safetensors", raw_safetensors(b'{"\xff\xfe":1}')),
    "safetensors surrogate": saved("x.safetensors",
        raw_safetensors('{"\\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}')),
    "safetensors infinity": saved("x.safetensors", raw_safetensors('{"a":Infinity}')),
    "safetensors long number": saved("x.safetensors", raw_safetensors('{"a":' + "9" * 100_000 + "}")),
    "index leaves the folder": index({"a": "../a.safetensors"}),
    "index absolute": index({"a": "/etc/passwd"}),
    "index to a missing shard": index({"a": "a.safetensors"}),
    "index is a list": index(["a"]),
    "index of numbers": index({"a": 1}),
    "index names a tensor elsewhere": index({"b": "a.safetensors"}, a=safetensors_bytes({"a": F32})),
    "link out of the folder": linked_out,
    "config duplicate": model("config.json", b'{"model_type": "llama", "model_type": "llama"}'),
    "config nested 1000": model("config.json", b'{"a":' + b"[" * 1000 + b"]" * 1000 + b"}"),
    "config a list": model("config.json", b"[]"),
    "config not UTF-8": model("config.json", b'{"model_type": "\xff"}'),
    "config of 20 MB": model("config.json", b'{"a": "' + b"x" * 16_000_000 + b'"}'),
    "config of a million values": model("config.json", b'{"a": [' + b"1," * 7_000_000 + b"1]}"),
    "pickle bomb": saved("pytorch_model.bin", b"PK\x03\x04" + b"\0" * 100),
    "pickle truncated": cut(VECTORS / "hf_bin/pytorch_model.bin", 0.5),
}  # fmt: skip

ODD = [
    0,
    -1,
    1,
    3,
    10**9,
    10**30,
    2**63,
    "8",
    "x" * 1000,
    None,
    True,
    [],
    [1] * 100,
    {},
    {"a": {"b": [{}]}},
    1.5,
    -0.0,
    1e300,
]
"""Invalid values for numbers in config.json."""
CONFIG = (
    "num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size "
    "rms_norm_eps "
    "max_position_embeddings rope_theta rope_scaling rope_parameters tie_word_embeddings model_type architectures "
    "hidden_act "
    "quantization_config bos_token_id eos_token_id"
)
TOKENIZER = "model added_tokens pre_tokenizer normalizer post_processor decoder"
SETTINGS = [
    *(("config.json", key) for key in CONFIG.split()),
    *(("tokenizer.json", key) for key in TOKENIZER.split()),
    *(("tokenizer_config.json", key) for key in ["chat_template", "bos_token", "model_max_length", "add_bos_token"]),
]  # fmt: skip
COSTLY = {
    "safetensors many tensors",
    "safetensors many objects",
    "safetensors one long escaped name",
    "metadata of 14 MB",
    "300,000 merges",
    "300,000 tokens",
}
"""Input at every limit, or one beyond: refused within a second, with tolerance for a busy machine."""


def _tokens(n: int) -> dict[str, int]:
    return {f"t{i}": i for i in range(n)}


def _longest_twice(tokenizer: dict[str, Any]) -> None:
    token = max(tokenizer["model"]["vocab"], key=len)
    tokenizer["model"]["merges"] = [f"{token} {token}"]


UNTRANSLATABLE: dict[str, Maker] = {
    "layers 1e9": setting(num_hidden_layers=10**9),
    "heads do not divide": setting(num_attention_heads=7, head_dim=None),
    "kv heads do not divide": setting(num_key_value_heads=3),
    "heads as text": setting(num_attention_heads="8"),
    "hidden as nested garbage": setting(hidden_size={"a": [[[]]]}),
    "negative layers": setting(num_hidden_layers=-5),
    "negative eps": setting(rms_norm_eps=-1),
    "hidden unlike the tensors": setting(hidden_size=512, head_dim=None, num_attention_heads=16),
    "tokenizer without model": model("tokenizer.json", b"{}"),
    "tokenizer a list": model("tokenizer.json", b"[]"),
    "tokenizer a number": model("tokenizer.json", b"1"),
    "tokenizer empty": model("tokenizer.json", b""),
    "tokenizer model text": model("tokenizer.json", lambda t: t.update(model="x")),
    "tokenizer vocab list": model("tokenizer.json", lambda t: t["model"].update(vocab=["a"])),
    "tokenizer vocab of text": model("tokenizer.json", lambda t: t["model"].update(vocab={"a": "b"}, merges=[])),
    "tokenizer ids negative": model("tokenizer.json", lambda t: t["model"].update(vocab={"a": -1}, merges=[])),
    "tokenizer ids twice": model("tokenizer.json", lambda t: t["model"].update(vocab={"a": 0, "b": 0})),
    "tokenizer merges numbers": model("tokenizer.json", lambda t: t["model"].update(merges=[1, 2])),
    "tokenizer merges of unknown": model("tokenizer.json", lambda t: t["model"].update(merges=["zz qq"])),
    "tokenizer merges too long": model("tokenizer.json", _longest_twice),
    "tokenizer added garbage": model("tokenizer.json", lambda t: t.update(added_tokens=[1, {"id": "x"}])),
    "tokenizer deep": model("tokenizer.json", b'{"model":' + b"[" * 1000 + b"]" * 1000 + b"}"),
    "tokenizer not UTF-8": model("tokenizer.json", b'{"model": "\xff"}'),
    "tokenizer_config list": model("tokenizer_config.json", b"[]"),
    "special tokens garbage": model("special_tokens_map.json", b"[1]"),
}  # fmt: skip
"""Valid folders without a valid meaning: they open; converting fails in one line, or reports omissions."""

INCOMPLETE: dict[str, Maker] = {
    "more layers than tensors": setting(num_hidden_layers=50),
    "tokenizer ids huge": model("tokenizer.json", lambda t: t["model"].update(vocab={"a": 10**12}, merges=[])),
    "tokenizer added huge id": model("tokenizer.json",
        lambda t: t.update(added_tokens=[{"id": 10**9, "content": "x", "special": True}])),
}  # fmt: skip
"""Converted, with a warning about missing or omitted parts."""

UNLIKELY = {
    "template loops": model("tokenizer_config.json",
        lambda c: c.update(chat_template="{% for i in range(10**12) %}x{% endfor %}")),
    "template fills memory": model("tokenizer_config.json", lambda c: c.update(chat_template="{{ 'x' * 10**11 }}")),
    "template reaches out": model("tokenizer_config.json",
        lambda c: c.update(chat_template="{{ ''.__class__.__mro__ }}")),
    "template of garbage": model("tokenizer_config.json", lambda c: c.update(chat_template=[1, {"name": 3}])),
    "300,000 tokens": model("tokenizer.json", lambda t: t["model"].update(vocab=_tokens(300_000))),
    "300,000 merges": model("tokenizer.json",
        lambda t: t["model"].update(merges=[f"t{i} t{i}" for i in range(300_000)])),
    "pre-tokenizer garbage": model("tokenizer.json",
        lambda t: t.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": 1}]})),
    "pre-tokenizer expression": model("tokenizer.json",
        lambda t: t.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$" * 1000}})),
    "metadata of 14 MB": saved("x.safetensors", lambda: raw_safetensors(
        b'{"__metadata__":{' + b",".join(b'"%06d":"%s"' % (i, b"\xe4\xb8\xad" * 20) for i in range(170_000)) + b"}}")),
    "array of strings": saved("x.gguf", lambda: file([ARCH, array("x", 8, ["y"] * 100_000)])),
    "NaN": saved("x.gguf", file([ARCH], [tensor("a.weight", (4, 2), 0, 0)], b"\xff" * 32)),
    "NaN scales": saved("x.gguf", file([ARCH], [tensor("a.weight", (32, 2), 8, 0)], b"\xff" * 68)),
    "sound noise": saved("x.gguf", sound()),
}  # fmt: skip
"""Input that may be read or refused, as long as it costs little."""
