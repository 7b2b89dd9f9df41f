"""Fuzz targets: the readers of everything untrusted, each as a function of bytes.

`run` raises only PolyquantError for any input, and returns True if the input was accepted; an accepted input is
validated and every tensor is read. The inputs of a folder's files are `NAME\\nCONTENT`: the file of that name is
replaced in an otherwise valid folder. All are opened, checked and translated to the other naming scheme; one in PLANNED
is planned or loaded too, and one in WHOLE also validated with its tensors, hashed and read.
"""

from __future__ import annotations

import functools
import json
import pickle
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import polyquant as pq
from folders import safetensors_bytes
from formats import gguf_files
from fuzz import mutators
from golden import VECTORS
from polyquant.analysis.integrity.files import read_list
from polyquant.analysis.model_check import model_findings
from polyquant.calibration.importance import load_importance
from polyquant.calibration.samples import read_samples
from polyquant.errors import PolyquantError
from polyquant.integrations.server.embeddings import embedding_request
from polyquant.integrations.server.requests import chat_request, completion_request
from polyquant.opening import ChecksHeaders, detect, open_as
from polyquant.recipes.reading import load_recipe
from polyquant.storage import pickle_reader, strict_json
from polyquant.storage.parsed import parsed_once
from polyquant.storage.source import FileState
from polyquant.tokenizers import reading, sentencepiece
from polyquant.tokenizers.tokenizer import open_tokenizer
from sentencepiece_files import sentencepiece as sentencepiece_file

KEPT = 20_000
"""Bytes of a seed: larger files are cut."""
CHECKED, PLANNED, WHOLE, HASHED = 4, 16, 64, 8
"""Every N-th input, on average, runs a slow stage that depends little on the input."""
_READ = 1 << 20
"""Elements of a tensor that are dequantized."""


@dataclass(frozen=True)
class Target:
    """run(data, folder): folder is empty at first and the same in every call."""

    seeds: Callable[[], list[bytes]]
    run: Callable[[bytes, Path], bool]
    mutate: Callable[[bytes, Random], bytes] = mutators.any_bytes


def write(path: Path, data: bytes) -> Path:
    """A new file: one that shrinks under a memory map would kill the process."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


def one_in(share: int, data: bytes) -> bool:
    """True for one of `share` inputs, always the same ones."""
    return zlib.crc32(data) % share == 0


def read_model(path: Path, *, hashed: bool = True) -> bool:
    """Open, validate, hash and read every tensor; each may be refused."""
    try:
        weights = pq.open(path)
    except PolyquantError as problem:
        assert "\n" not in str(problem)
        weights = {}
    try:
        for finding in pq.validate(path):
            assert "\n" not in str(finding)
        if hashed:
            assert len(pq.checksum(path, threads=1).tensors) == len(weights)
        for weight in weights.values():
            weight.read()
            if np.prod(weight.shape) <= _READ:
                weight.dequantize()
    except PolyquantError as problem:
        assert "\n" not in str(problem)
    return bool(weights)


def check_model(path: Path, *, headers: bool = True) -> bool:
    """Open a model and check everything except its tensors. headers: check these too, which reads the files again."""
    try:
        form, _ = detect(path)
        findings = [*form.check_headers(path)] if headers and isinstance(form, ChecksHeaders) else []
        checkpoint = open_as(form, path, {})
        findings += model_findings(checkpoint)
    except PolyquantError as problem:
        assert "\n" not in str(problem)
        return False
    assert not any("\n" in str(finding) for finding in findings)
    return checkpoint.undecoded is None


def accepted(call: Callable[[], object]) -> bool:
    """True if the call returns; False for a PolyquantError with a message of one line."""
    try:
        call()
    except PolyquantError as problem:
        assert "\n" not in str(problem)
        return False
    return True


# ---------------------------------------------------------------- single files


def _file(name: str) -> Callable[[bytes, Path], bool]:
    return lambda data, folder: read_model(write(folder / name, data), hashed=one_in(HASHED, data))


def _gguf_seeds() -> list[bytes]:
    """Every value type, arrays of each, a nested array; block types; big-endian and old versions."""
    types = {k: bytes(n) for k, n in mutators.SIZES.items()}
    values = [gguf_files.entry(f"x.{k}", k, raw) for k, raw in types.items()]
    arrays = [gguf_files.entry(f"y.{k}", 9, struct.pack("<IQ", k, 3) + 3 * raw) for k, raw in types.items()]
    nested = gguf_files.entry("z", 9, struct.pack("<IQIQ", 9, 1, 4, 1) + bytes(4))
    keys = [gguf_files.ARCH, *values, *arrays, nested, gguf_files.array("t", 8, ["a", "b"])]
    ids = (0, 1, 2, 8, 10, 12, 14, 20, 24, 30, 34, 36, 39)
    tensors = [gguf_files.tensor(f"t.{i}", (256, 2), i, 2048 * n) for n, i in enumerate(ids)]
    typed = gguf_files.file([gguf_files.ARCH], tensors, bytes(2048 * len(ids)))
    files = [p.read_bytes() for p in gguf_files.GGUF_VECTORS if p.stat().st_size < 1000]
    small = VECTORS / "models/tiny-llama-tied/tiny-llama-tied-Q4_0.gguf"
    llama = mutators.without_tensors(small.read_bytes())
    return [gguf_files.sound(), gguf_files.file(keys), typed, *files, llama[:KEPT]]


def _safetensors_seeds() -> list[bytes]:
    f16 = np.arange(64, dtype=np.float16).tobytes()
    packed = {"a.qweight": ("I32", [4, 4], bytes(64)), "a.scales": ("F16", [1, 4], bytes(8))}
    sound = safetensors_bytes({"a": ("F32", [2, 8], bytes(64)), "b": ("F16", [8, 8], f16)}, {"format": "pt"})
    views = VECTORS / "trellis/exl3_tensors.safetensors"
    head = 8 + int.from_bytes(views.read_bytes()[:8], "little")
    return [sound, safetensors_bytes(packed), safetensors_bytes({}), views.read_bytes()[: head + 4000]]


def _torch_seeds() -> list[bytes]:
    return [(VECTORS / "hf_bin" / name).read_bytes() for name in ("views.bin", "expanded.bin", "old.bin")]


def _pickled(data: bytes) -> bytes:
    with zipfile.ZipFile(BytesIO(data)) as archive:
        return archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))


def _pickle_seeds() -> list[bytes]:
    plain = [pickle.dumps({"a": [1, 2.5, b"x", ("y", None)]}, protocol) for protocol in range(6)]
    return [*map(_pickled, _torch_seeds()[:2]), *plain]


def _importance_seeds() -> list[bytes]:
    arrays = {"a.in_sum2": np.ones((2, 4), np.float32), "a.counts": np.ones((2, 1), np.float32)}
    tensors, at = [], 0
    for name, values in arrays.items():
        tensors.append(gguf_files.tensor(name, values.shape[::-1], 0, at))
        at += -(-values.nbytes // 32) * 32
    body = b"".join(v.tobytes().ljust(-(-v.nbytes // 32) * 32, b"\0") for v in arrays.values())
    return [gguf_files.file([gguf_files.text("general.type", "imatrix")], tensors, body)]


def _vocabulary_seeds() -> list[bytes]:
    """GGUF files with a tokenizer, without the weights."""
    plans = (pq.plan(VECTORS / "architectures" / name, "gguf") for name in ("llama3", "gemma", "bert"))
    return [mutators.without_tensors(plan.layout.files[0].pieces[0][1]) for plan in plans]


def _tokenize(checkpoint: pq.Checkpoint) -> None:
    tokenizer = open_tokenizer(checkpoint)
    ids = tokenizer.encode("Hello, wörld! 123\n<s>")
    tokenizer.decode(ids)
    tokenizer.decode([0, 1, 10**6])


def _recipe_seeds() -> list[bytes]:
    text = (
        'extends = "q4_k_m"\nfile_type = 15\nrules = [{match = "*ffn*", codec = "q8_0", layers = "first_2", gqa = 4}]\n'
    )
    rules = 'base = "q8_0"\n[[rules]]\nmatch = "output"\ncodec = "q6_k"\nimportance = true\n'
    return [text.encode(), rules.encode()]


# ---------------------------------------------------------------- folders


def tiny(folder: Path, rows: int = 8) -> Path:
    """A Llama of 1 layer, 32 features and 2 heads. rows: of the embeddings."""
    folder.mkdir()
    n = {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32)}
    shapes = {f"self_attn.{k}_proj": shape for k, shape in n.items()}
    shapes |= {"mlp.gate_proj": (32, 32), "mlp.up_proj": (32, 32), "mlp.down_proj": (32, 32)}
    shapes |= {"input_layernorm": (32,), "post_attention_layernorm": (32,)}
    names = {f"model.layers.0.{k}.weight": v for k, v in shapes.items()}
    names |= {"model.embed_tokens.weight": (rows, 32), "model.norm.weight": (32,)}
    rng = np.random.default_rng(0)
    arrays = {k: rng.normal(size=v).astype(np.float16) for k, v in names.items()}
    tensors = {k: ("F16", list(v.shape), v.tobytes()) for k, v in arrays.items()}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32, "vocab_size": rows,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_theta": 1e4, "tie_word_embeddings": True,
        "hidden_act": "silu", "rope_scaling": None, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def sharded(folder: Path) -> Path:
    """The same in two shards with an index."""
    tiny(folder.with_name("whole"))
    pq.convert(folder.with_name("whole"), folder, to="hf", shard_bytes=4000)
    return folder


def copied(place: str) -> Callable[[Path], Path]:
    return lambda folder: Path(shutil.copytree(VECTORS / place, folder))


def quantized(**options: object) -> Callable[[Path], Path]:
    """The tiny model converted to another format."""

    def make(folder: Path) -> Path:
        tiny(folder.with_name("whole"))
        pq.convert(folder.with_name("whole"), folder, **options)  # type: ignore[arg-type]
        return folder

    return make


@functools.cache
def _originals(make: Callable[[Path], Path], where: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    model = make(where / "model")
    return {name: (model / name).read_bytes() for name in names}


def _of_folder(
    make: Callable[[Path], Path],
    names: tuple[str, ...],
    use: Callable[[Path], object],
    check: Callable[[Path], bool] | None = None,
) -> Target:
    """Replace one of the files; `names` are relative to the folder.

    check: runs for most inputs, by default check_model; use: for a few.
    """
    headers: dict[FileState, Any] = {}

    def run(data: bytes, folder: Path) -> bool:
        originals = _originals(make, folder, names)
        name, _, content = data.partition(b"\n")
        file = name.decode("latin-1") if name.decode("latin-1") in originals else names[0]
        model = folder / "model"
        write(model / file, content)
        try:
            with parsed_once(headers):
                if content == originals[file] or one_in(WHOLE, data):
                    return bool(read_model(model) & accepted(lambda: use(model)))
                checked = check(model) if check else check_model(model, headers=one_in(CHECKED, data))
                return checked and (not one_in(PLANNED, data) or accepted(lambda: use(model)))
        finally:
            if len(names) > 1:
                write(model / file, originals[file])

    def seeds() -> list[bytes]:
        import tempfile

        with tempfile.TemporaryDirectory() as scratch:
            model = make(Path(scratch) / "model")
            return [name.encode() + b"\n" + (model / name).read_bytes()[:KEPT] for name in names]

    def mutate(data: bytes, rng: Random) -> bytes:
        name, _, content = data.partition(b"\n")
        if rng.random() < 0.02:
            name = rng.choice(names).encode()
        kind = mutators.safetensors if name.endswith(b".safetensors") else mutators.json_text
        return name + b"\n" + kind(content, rng)

    return Target(seeds, run, mutate)


def _plan(model: Path) -> None:
    pq.plan(model, "gguf", allow_unknown=True)


def _load(model: Path) -> None:
    pq.plan(model, "gguf")
    pq.load(model).logits([1, 2])


def _tokenizer_folder(folder: Path) -> Path:
    tiny(folder, rows=300)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(VECTORS / "architectures/llama3" / name, folder / name)
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.6, "top_p": 0.9}')
    return folder


def _check_tokenizer(model: Path) -> bool:
    def read() -> None:
        checkpoint = pq.open(model)
        accepted(lambda: reading.from_files(checkpoint.files, checkpoint.config, rows=300))
        _tokenize(checkpoint)

    return accepted(read)


# ---------------------------------------------------------------- requests


def _request(data: bytes, folder: Path) -> bool:
    del folder
    try:
        body = strict_json.parse(data)
    except PolyquantError:
        return False
    parsers = (
        lambda: completion_request(body),
        lambda: chat_request(body),
        lambda: embedding_request(body, 32),
    )
    return sum(accepted(parse) for parse in parsers) > 0  # every parser runs


def _request_seeds() -> list[bytes]:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 3}
    more = {
        "model": "m",
        "max_tokens": 4,
        "stop": ["a"],
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "y"}]}]
    bodies = (
        {"prompt": ["a", "b"], "logprobs": 0, **more, **sampling}, {"messages": messages, **more, **sampling},
        {"prompt": [1, 2, 3], "model": "m"},
        {"input": ["a", [1, 2]], "model": "m", "encoding_format": "base64", "dimensions": 8},
    )  # fmt: skip
    return [json.dumps(body).encode() for body in bodies]


def _samples_seeds() -> list[bytes]:
    return [b'["a", "b"]', b'{"text": "a"}\n{"text": "b"}\n', b'[{"input_ids": [1, 2]}]']


def _json_seeds() -> list[bytes]:
    return [b'{"a": [1, 2.5, -3e4, "x\\n\\u00e9\\ud83d\\ude00", null, true], "b": {"c": {}}}', b"[]", b"1"]


def _strict(data: bytes, folder: Path) -> bool:
    """Compare accepted JSON with json.loads."""
    del folder
    try:
        value = strict_json.parse(data)
    except PolyquantError:
        return False
    assert json.loads(data) == value
    return True


def _template_free(data: bytes, folder: Path) -> bool:
    path = write(folder / "tokenizer.model", data)
    return accepted(lambda: sentencepiece.read(path)) and accepted(
        lambda: reading.from_files({"tokenizer.model": path}, {"model_type": "llama"})
    )


# ---------------------------------------------------------------- checksums


_SMALL = {"a": ("F32", [2, 8], bytes(range(64))), "b": ("F16", [4, 8], bytes(64))}


def _checksum_seeds() -> list[bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        sums = pq.checksum(write(Path(scratch) / "x.safetensors", safetensors_bytes(_SMALL)))
        other = replace(sums, tensors={**sums.tensors, "c": sums.tensors["a"]}, files={})
        return [json.dumps(s.to_json()).encode() for s in (sums, other)]


def _small(path: Path) -> Path:
    """A model of two tensors."""
    return path if path.exists() else write(path, safetensors_bytes(_SMALL))


def _checked(model: Path, data: bytes, read: Callable[[], object]) -> bool:
    """Read a file of checksums, and validate the model with it; with one in HASHED of those that are refused."""
    readable = accepted(read)
    if readable or one_in(HASHED, data):
        assert not any("\n" in str(finding) for finding in pq.validate(model))
    return readable


def _checksums(data: bytes, folder: Path) -> bool:
    place = write(folder / "x.safetensors.checksums.json", data)
    return _checked(_small(folder / "x.safetensors"), data, lambda: pq.Checksums.read(place))


def _list_seeds() -> list[bytes]:
    digest = "0" * 64
    return [f"{digest}  model.safetensors\n# {digest}\n\\{digest} *a\\nb\nSHA256 (./c) = {digest}\n".encode()]


def _list(data: bytes, folder: Path) -> bool:
    (folder / "model").mkdir(exist_ok=True)
    _small(folder / "model/model.safetensors")
    place = write(folder / "model/SHA256SUMS", data)
    return _checked(folder / "model", data, lambda: read_list(place))


_LINEARS = ("config.json", "quant_model_description.json")
TARGETS: dict[str, Target] = {
    "gguf": Target(_gguf_seeds, _file("x.gguf"), mutators.gguf),
    "safetensors": Target(_safetensors_seeds, _file("x.safetensors"), mutators.safetensors),
    "torch": Target(_torch_seeds, _file("x.bin")),
    "pickle": Target(_pickle_seeds, lambda data, folder: accepted(lambda: pickle_reader.state_dict(data))),
    "config": _of_folder(tiny, ("config.json",), _load),
    "index": _of_folder(sharded, ("model.safetensors.index.json",), lambda model: None),
    "trellis_v3": _of_folder(copied("trellis/v3_shard_writer"), ("trellis_index.json",), lambda model: None),
    "trellis_v2": _of_folder(copied("trellis/v2_odd"), ("quantization_index.json",), lambda model: None),
    "msmodelslim": _of_folder(quantized(to="msmodelslim", codec="w8a16"), _LINEARS, _plan),
    "tokenizer": _of_folder(
        _tokenizer_folder,
        ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
        lambda model: [*model_findings(pq.open(model))],
        _check_tokenizer,
    ),
    "sentencepiece": Target(
        lambda: [sentencepiece_file([("<unk>", 0, 2), ("a", -1, 1), ("<0x0A>", 0, 6)], kind) for kind in (1, 2)],
        _template_free,
    ),
    "vocabulary": Target(
        _vocabulary_seeds,
        lambda data, folder: accepted(lambda: _tokenize(pq.open(write(folder / "x.gguf", data)))),
        mutators.gguf,
    ),
    "importance": Target(
        _importance_seeds,
        lambda data, folder: accepted(lambda: load_importance(write(folder / "x.gguf", data))),
        mutators.gguf,
    ),
    "recipe": Target(
        _recipe_seeds, lambda data, folder: accepted(lambda: load_recipe(str(write(folder / "x.toml", data))))
    ),
    "samples": Target(
        _samples_seeds,
        lambda data, folder: accepted(lambda: read_samples(write(folder / "x.json", data))),
        mutators.json_text,
    ),
    "checksums": Target(_checksum_seeds, _checksums, mutators.json_text),
    "sha256_list": Target(_list_seeds, _list),
    "json": Target(_json_seeds, _strict, mutators.json_text),
    "request": Target(_request_seeds, _request, mutators.json_text),
}
