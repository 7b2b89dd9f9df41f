"""hf://: revisions, listings, redirects to storage, tokens; requests and bytes of remote inspection are counted."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

import polyquant as pq
from polyquant.analysis.headers import compare_headers
from polyquant.errors import InputError, RemoteError
from polyquant.storage.locations import located
from polyquant.storage.remote import http
from polyquant.storage.safetensors import header_bytes
from polyquant.storage.source import Source
from remote_server import COMMIT, SIGNATURE, Server, faults, running

constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")

VECTORS = Path(__file__).parents[2] / "vectors"
LLAMA = VECTORS / "models" / "tiny-llama-untied" / "hf"
GGUF = VECTORS / "bitnet_gguf" / "tiny-bitnet-b158-tl2.gguf"


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with running(Server()) as storage, running(Server(storage=storage)) as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        yield made


def sparse(path: Path, head: bytes, size: int) -> None:
    """A file with this beginning and this size, without data."""
    with path.open("wb") as f:
        f.write(head)
        f.truncate(size)


def big_gguf(path: Path, size: int) -> None:
    """A GGUF header with 291 tensors and a vocabulary of 20,000 tokens, then zeros up to about `size` bytes."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    tokens = b"".join(string(f"token{i}") for i in range(20_000))
    keys = [
        string("general.architecture") + struct.pack("<I", 8) + string("llama"),
        string("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 20_000) + tokens,
    ]
    count = 291
    rows = size // count // 2 // 4096
    infos = [
        string(f"blk.{i}.ffn_up.weight") + struct.pack("<IQQIQ", 2, 4096, rows, 1, i * rows * 4096 * 2)
        for i in range(count)
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, count, len(keys)) + b"".join((*keys, *infos))
    head += bytes(-len(head) % 32)
    sparse(path, head, len(head) + count * rows * 4096 * 2)


def big_safetensors(path: Path, size: int, first: int = 0, count: int = 400) -> dict[str, str]:
    rows = size // count // 2 // 4096
    tensors = [
        (f"model.layers.{i}.mlp.experts.up_proj.weight", "BF16", (rows, 4096)) for i in range(first, first + count)
    ]
    head, _ = header_bytes(tensors, {"format": "pt"})
    sparse(path, head, len(head) + count * rows * 4096 * 2)
    return {name: path.name for name, _, _ in tensors}


def test_a_20_gb_gguf_file(hub, tmp_path):
    """Under 1 MB and at most 6 requests, redirect to the storage included."""
    hub.repos["org/model"], hub.large = tmp_path, 1 << 20
    big_gguf(tmp_path / "model.gguf", 20 << 30)
    seen = pq.inspect("hf://org/model/model.gguf")
    assert (len(seen.tensors), seen.format) == (291, "gguf")
    assert seen.nbytes > 19 << 30
    requests = len(hub.requests) + len(hub.storage.requests)
    assert requests <= 6
    assert hub.sent + hub.storage.sent < 1_000_000


def test_a_20_gb_safetensors_file(hub, tmp_path):
    hub.repos["org/model"], hub.large = tmp_path, 1 << 20
    big_safetensors(tmp_path / "model.safetensors", 20 << 30)
    seen = pq.inspect("hf://org/model/model.safetensors")
    assert len(seen.tensors) == 400
    assert len(hub.requests) + len(hub.storage.requests) <= 6
    assert hub.sent + hub.storage.sent < 1_000_000


def test_a_folder_of_100_shards_is_read_in_parallel(hub, tmp_path):
    hub.repos["org/model"], hub.large = tmp_path, 1 << 20
    weight_map: dict[str, str] = {}
    for i in range(1, 101):
        weight_map |= big_safetensors(tmp_path / f"model-{i:05}-of-00100.safetensors", 1 << 30, 40 * i, 40)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shutil.copy(LLAMA / "config.json", tmp_path)
    hub.storage.delay = 0.02
    seen = pq.inspect("hf://org/model@v1")
    assert len(seen.tensors) == 4000
    assert sum(r.path.startswith("/api/") for r in hub.requests) == 1
    assert len(hub.storage.requests) == 100
    assert len(hub.requests) <= 104
    assert hub.sent + hub.storage.sent < 6_000_000
    assert max(_overlaps(hub.storage)) > 4


def _overlaps(server: Server) -> list[int]:
    """For each request, the number of requests that ran at the same time."""
    return [sum(a.began < b.ended and b.began < a.ended for b in server.requests) for a in server.requests]


def test_a_repository_equals_the_local_folder(hub):
    hub.repos["org/llama"] = LLAMA
    for url in ("hf://org/llama", f"hf://org/llama@{COMMIT}", "hf://org/llama@refs/pr/1", "hf://org/llama/"):
        remote, local = pq.open(url), pq.open(LLAMA)
        assert list(remote) == list(local)
        assert dict(remote.config) == dict(local.config)
        assert sorted(remote.files) == sorted(local.files)
        name = next(iter(local))
        np.testing.assert_array_equal(remote[name].dequantize(), local[name].dequantize())


def test_one_file_of_a_folder_in_a_repository(hub, tmp_path):
    (tmp_path / "sub").mkdir()
    shutil.copy(GGUF, tmp_path / "sub" / "m.gguf")
    hub.repos["org/m"] = tmp_path
    assert len(pq.open("hf://org/m/sub/m.gguf")) == len(pq.open(GGUF))
    assert located("hf://org/m/sub").is_dir()
    assert [p.name for p in located("hf://org/m").iterdir()] == ["sub"]
    assert not located("hf://org/m/other").exists()


def test_every_file_is_of_the_commit_of_the_listing(hub):
    hub.repos["org/llama"] = LLAMA
    pq.open("hf://org/llama")
    files = [r.path for r in hub.requests if "/resolve/" in r.path]
    assert files
    assert all(f"/resolve/{COMMIT}/" in path for path in files)


def test_convert_from_a_repository_gives_the_same_bytes(hub, tmp_path):
    local = tmp_path / "llama"
    shutil.copytree(LLAMA, local)
    hub.repos["org/llama"], hub.large = LLAMA, 10_000
    hub.fault = faults(0.05, ("500", "reset", "throttle"), 3)
    hub.storage.fault = faults(0.05, ("500", "reset", "throttle"), 4)
    pq.convert(local, tmp_path / "a.gguf", codec="q8_0")
    pq.convert("hf://org/llama@main", tmp_path / "b.gguf", codec="q8_0")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gguf", "b.gguf", "llama"]


# ---------------------------------------------------------------- tokens and refusals


def test_the_token_is_sent_to_the_hub_only(hub, tmp_path, monkeypatch):
    hub.repos["org/m"], hub.large, hub.token = tmp_path, 1000, "hf_TOPSECRET"
    shutil.copy(GGUF, tmp_path / "m.gguf")
    with pytest.raises(RemoteError, match=r"access is denied.*401.*hf auth login"):
        pq.inspect("hf://org/m/m.gguf")
    from polyquant.storage import locations

    locations._made.clear()
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_TOPSECRET")
    seen = pq.inspect("hf://org/m/m.gguf")
    assert "TOPSECRET" not in str(seen.to_json())
    assert all("Authorization" not in r.headers for r in hub.storage.requests)
    assert [r.query for r in hub.storage.requests] == [SIGNATURE]


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        ("401", RemoteError, r"access is denied.*private repository needs `hf auth login`"),
        ("403", RemoteError, r"access is denied.*accept the model's licence"),
        ("404", InputError, r"does not exist.*check the name, the revision"),
    ],
)
def test_a_refusal_has_a_hint(hub, status, error, message):
    hub.fault = lambda request, number: status
    with pytest.raises(error, match=message):
        pq.inspect("hf://org/m/m.gguf")


def test_a_missing_file(hub):
    hub.repos["org/llama"] = LLAMA
    with pytest.raises(InputError, match="is not a file of the repository"):
        pq.inspect("hf://org/llama/other.gguf")
    with pytest.raises(InputError, match="does not exist on the server"):
        pq.inspect("hf://org/llama@v9")


def test_a_downgrade_to_http_is_refused(hub, monkeypatch):
    resource = http.Resource(located("hf://org/m/x"), "https://hub/x", "Bearer TOPSECRET")
    monkeypatch.setattr(http, "_send", lambda *_: _Redirect())
    with pytest.raises(RemoteError, match="redirects from https to http") as caught:
        http.open_range(resource, 10)
    assert "TOPSECRET" not in str(caught.value)


class _Redirect:
    status, length = 302, 0

    def __init__(self):
        self.headers = {"Location": "http://elsewhere/x?sig=TOPSECRET"}

    def read(self):
        return b""

    def isclosed(self):
        return True


# ---------------------------------------------------------------- hostile hubs


@pytest.mark.parametrize("name", ["../x.gguf", "/etc/passwd", "a//b", "a/../../b", "a\x1b[31m", ".."])
def test_a_name_that_leaves_the_repository_is_refused(hub, name):
    hub.repos["org/llama"] = LLAMA
    hub.listing = lambda siblings: [*siblings, {"rfilename": name, "size": 1, "blobId": "x"}]
    with pytest.raises(InputError, match="lists a name that leaves the folder") as caught:
        pq.inspect("hf://org/llama")
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("size", [-1, "1", 1 << 63, None, 1.5, True])
def test_an_invalid_size_is_refused(hub, size):
    hub.repos["org/llama"] = LLAMA
    hub.listing = lambda siblings: [{**s, "size": size} for s in siblings]
    with pytest.raises(InputError, match="size"):
        pq.inspect("hf://org/llama")


def test_a_size_that_differs_from_the_listing_is_refused(hub):
    hub.repos["org/llama"] = LLAMA
    hub.listing = lambda siblings: [{**s, "size": s["size"] + 1} for s in siblings]
    with pytest.raises(RemoteError, match="differs from the listing"):
        pq.inspect("hf://org/llama")


def test_an_endless_listing_is_abandoned(hub, monkeypatch):
    from polyquant.storage.remote import hub as module

    hub.repos["org/llama"] = LLAMA
    monkeypatch.setattr(module, "_ANSWER", 1000)
    hub.listing = lambda siblings: siblings * 1000
    with pytest.raises(RemoteError, match="answer is too large"):
        pq.inspect("hf://org/llama")


def test_an_invalid_listing(hub, monkeypatch):
    hub.repos["org/llama"] = LLAMA
    for broken in ([1], [{}], [{"rfilename": 1, "size": 1}], {"a": 1}):
        hub.listing = lambda siblings, broken=broken: broken
        with pytest.raises(InputError):
            pq.inspect("hf://org/llama")


def test_offline(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RemoteError, match="HF_HUB_OFFLINE forbids requests"):
        pq.inspect("hf://org/llama")


def test_a_missing_package_is_one_line(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RemoteError, match=r"huggingface_hub; pip install 'polyquant\[remote\]'"):
        pq.inspect("hf://org/llama")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(RemoteError, match=r"fsspec; pip install 'polyquant\[remote\]'"):
        pq.inspect("s3://bucket/model.gguf")


def test_a_lfs_pointer_in_a_repository(hub, tmp_path):
    hub.repos["org/m"] = tmp_path
    (tmp_path / "m.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(InputError, match="Git LFS pointer"):
        Source("hf://org/m/m.gguf")
    assert os.fspath(located("hf://org/m/m.gguf")) == "hf://org/m/m.gguf"


def test_headers_are_validated_and_compared_with_few_requests(hub, tmp_path):
    """A 20 GB file each, under 1 MB."""
    hub.repos["org/model"], hub.large = tmp_path, 1 << 20
    big_gguf(tmp_path / "model.gguf", 20 << 30)
    big_safetensors(tmp_path / "model.safetensors", 20 << 30)
    for name in ("model.gguf", "model.safetensors"):
        findings = pq.validate(f"hf://org/model/{name}", headers=True)
        assert not [f for f in findings if f.code.startswith(("GGUF", "HF"))]
    compare_headers("hf://org/model/model.gguf", tmp_path / "model.gguf")
    assert len(hub.requests) + len(hub.storage.requests) <= 10
    assert hub.sent + hub.storage.sent < 2_000_000


def test_a_whole_check_and_checksums_of_a_repository(hub, tmp_path):
    hub.repos["org/llama"] = LLAMA
    assert pq.validate("hf://org/llama") == pq.validate(LLAMA)
    remote, local = pq.checksum("hf://org/llama"), pq.checksum(LLAMA)
    assert remote.tensors == local.tensors
    assert {n: f.sha256 for n, f in remote.files.items()} == {n: f.sha256 for n, f in local.files.items()}
    assert pq.compare(LLAMA, "hf://org/llama").error.rrmse == 0


def test_other_commands(hub, tmp_path):
    """A model at a URL runs, is certified and repaired; it cannot be edited."""
    hub.repos["org/llama"] = LLAMA
    broken = shutil.copytree(VECTORS / "msmodelslim" / "v1" / "fp32" / "w8a8_smoothasym_c8", tmp_path / "w8a8")
    for description in broken.glob("quant_model_description*.json"):
        description.unlink()
    hub.repos["org/w8a8"] = broken
    assert len(list(pq.load("hf://org/llama").generate("hello", max_tokens=2))) == 2
    pq.convert("hf://org/llama", tmp_path / "m.gguf", codec="q8_0")
    assert pq.certify("hf://org/llama", tmp_path / "m.gguf").certified
    for source, target in (("hf://org/w8a8", "repaired"), (broken, "local")):
        pq.repair(source, tmp_path / target, kind="W8A8")
    same = [p.name for p in (tmp_path / "local").iterdir()]
    assert all((tmp_path / "repaired" / n).read_bytes() == (tmp_path / "local" / n).read_bytes() for n in same)
    with pytest.raises(pq.PlanError, match=r"cannot be edited.*download the file"):
        pq.edit("hf://org/llama/model.safetensors", tmp_path / "x.gguf")
