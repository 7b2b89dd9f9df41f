"""Headers of the folders that quantization libraries write, without their weights (tests/vectors/consumers).

A folder is unpacked with sparse weight files of the right size, so that everything that reads only headers can be
tested.
"""

import json
import lzma
import struct
from functools import cache
from pathlib import Path

VECTORS = Path(__file__).parent / "vectors/consumers"
HEADERS, TRIED = VECTORS / "headers.json.xz", VECTORS / "tried.json"


@cache
def headers():
    """Case -> {"files": {name: content}, "headers": {name: safetensors header}}."""
    return json.loads(lzma.decompress(HEADERS.read_bytes()))


@cache
def tried():
    """Program -> {"versions": text, "cases": {case: {"result", "rms", "detail"}}}."""
    return json.loads(TRIED.read_text(encoding="utf-8"))


def unpack(case, folder):
    """Write the folder of a case; its weights are zeros that use no disk."""
    folder.mkdir(parents=True)
    for name, content in headers()[case]["files"].items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")  # the libraries got none
    for name, header in headers()[case]["headers"].items():
        write_header(folder / name, header)
    return folder


def write_header(path, header):
    """Write a safetensors file with this header and sparse zeros."""
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    end = max((entry["data_offsets"][1] for n, entry in header.items() if n != "__metadata__"), default=0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)


def pack(source):
    """The content of HEADERS from a folder with a manifest.json and CASE/model folders."""
    cases = sorted(c["case"] for c in json.loads((source / "manifest.json").read_text())["cases"])
    return lzma.compress(json.dumps({c: _read(source / c / "model") for c in cases}).encode(), preset=9)


def _read(folder):
    small = ("config.json", "hf_quant_config.json", "quantize_config.json")
    files = {n: json.loads((folder / n).read_text()) for n in small if (folder / n).exists()}
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found[path.name] = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return {"files": files, "headers": found}
