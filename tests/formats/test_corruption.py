"""Every truncation is rejected, and every changed byte of a header is rejected or harmless.

Rejected: opening raises a PolyquantError, or `validate` has a finding. Harmless: each tensor that still has its name,
codec and shape has the same bytes, so no value is silently read from another place; what changed (a name, a shape, a
type, a value of the metadata) is what the changed byte declares.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polyquant as pq
from folders import safetensors_bytes
from formats import gguf_files
from fuzz.targets import sharded, tiny
from golden import VECTORS
from polyquant.errors import PolyquantError

FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
GGUF = gguf_files.sound()
SAFETENSORS = safetensors_bytes(
    {"a": ("F32", [2, 8], bytes(range(64))), "b": ("F16", [8, 8], bytes(range(128)))}, {"format": "pt"}
)
TORCH = (VECTORS / "hf_bin/views.bin").read_bytes()


def content(path: Path) -> dict[tuple[str, str, tuple[int, ...]], bytes] | None:
    """(name, codec, shape) -> bytes of every tensor; None if the model is rejected."""
    try:
        found = {
            (w.name, w.codec.name, tuple(w.shape)): b"".join(p.tobytes() for p in w.read().values())
            for w in pq.open(path).values()
        }
        return None if len(pq.validate(path)) > sound_findings(path) else found
    except PolyquantError as problem:
        assert "\n" not in str(problem)
        return None


def sound_findings(path: Path) -> int:
    """Findings of the unchanged samples: a bare file without architecture has some."""
    return BASE.get(path.name, 0)


BASE: dict[str, int] = {}


def saved(folder: Path, name: str, raw: bytes) -> Path:
    path = folder / name
    path.unlink(missing_ok=True)
    path.write_bytes(raw)
    return path


@pytest.fixture
def sample(tmp_path):
    """Call with a file's name and content: the content of its tensors; its findings are the baseline."""

    def make(name, raw):
        path = saved(tmp_path, name, raw)
        BASE[name] = len(pq.validate(path))
        whole = content(path)
        assert whole
        return path, whole

    yield make
    BASE.clear()


def harmless(found, whole):
    return all(found[key] == raw for key, raw in whole.items() if key in found)


@pytest.mark.parametrize("name, raw", [("x.gguf", GGUF), ("x.safetensors", SAFETENSORS), ("x.bin", TORCH)])
def test_every_truncation_of_a_file_is_rejected(name, raw, sample, tmp_path):
    sample(name, raw)
    for n in range(0, len(raw), 1 if len(raw) < 1000 else 3):
        assert content(saved(tmp_path, name, raw[:n])) is None, n


@pytest.mark.parametrize("name, raw, head", [("x.gguf", GGUF, 192), ("x.safetensors", SAFETENSORS, None)])
def test_every_flipped_bit_of_a_header_is_rejected_or_harmless(name, raw, head, sample, tmp_path):
    _, whole = sample(name, raw)
    head = head if head is not None else 8 + int.from_bytes(raw[:8], "little")
    assert len(raw) - head in (160, 192)  # the data of the two samples
    rejected = 0
    for at in range(head):
        for bit in range(8):
            changed = bytearray(raw)
            changed[at] ^= 1 << bit
            found = content(saved(tmp_path, name, bytes(changed)))
            rejected += found is None
            assert found is None or harmless(found, whole), (at, bit)
    assert 0 < rejected < 8 * head


# ---------------------------------------------------------------- folders


def split(folder: Path) -> Path:
    """A split GGUF in a separate folder."""
    tiny(folder.with_name("whole"))
    folder.mkdir()
    pq.convert(folder.with_name("whole"), folder / "m.gguf", shard_bytes=4000)
    return folder


def trellis(folder: Path) -> Path:
    return Path(shutil.copytree(VECTORS / "trellis/v2_odd", folder))


def modelslim(folder: Path) -> Path:
    tiny(folder.with_name("whole"))
    pq.convert(folder.with_name("whole"), folder, to="msmodelslim", codec="w8a16")
    return folder


def written(**options: object) -> Callable[[Path], Path]:
    """The tiny model converted, in several files."""

    def make(folder: Path) -> Path:
        tiny(folder.with_name("whole"))
        pq.convert(folder.with_name("whole"), folder, shard_bytes=4000, **options)  # type: ignore[arg-type]
        return folder

    return make


FOLDERS = {
    "hf": tiny,
    "sharded": sharded,
    "trellis": trellis,
    "trellis v3": written(codec="trellis.3.grid"),
    "msmodelslim": modelslim,
    "msmodelslim in shards": written(to="msmodelslim", codec="w4a8.dynamic"),
}


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request, tmp_path_factory):
    """(path, its files, its tensors); tests restore changed files."""
    path = FOLDERS[request.param](tmp_path_factory.mktemp(request.param) / "model")
    BASE[path.name] = len(pq.validate(path))
    whole = content(path)
    assert whole
    files = {p.relative_to(path): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
    yield path, files, whole
    BASE.clear()


def changed(folder, name, raw):
    """The tensors of the folder with one other file."""
    path, files, _ = folder
    BASE.setdefault(path.name, 0)
    saved(path, name, raw)
    try:
        return content(path)
    finally:
        saved(path, name, files[name])


def test_truncated_files_of_a_folder_are_rejected(folder):
    """Every file, at its ends and at random lengths."""
    _, files, whole = folder
    rng = np.random.default_rng(0)
    for name, raw in files.items():
        for n in sorted({0, 1, len(raw) // 2, len(raw) - 1, *rng.integers(0, len(raw), 10).tolist()}):
            if not raw[n:].strip():  # the last line end of a text file
                assert changed(folder, name, raw[:n]) == whole
            else:
                assert changed(folder, name, raw[:n]) is None, (name, n)


@FEW
@given(data=st.data())
def test_a_changed_byte_of_a_small_file_is_rejected_or_harmless(folder, data):
    _, files, whole = folder
    name = data.draw(st.sampled_from([n for n in sorted(files) if n.suffix == ".json"]))
    at = data.draw(st.integers(0, len(files[name]) - 1))
    raw = bytearray(files[name])
    raw[at] = data.draw(st.integers(0, 255).filter(lambda b: b != raw[at]))
    found = changed(folder, name, bytes(raw))
    assert found is None or harmless(found, whole), (name, at, raw[at])


@pytest.mark.parametrize("member", [0, 1])
def test_every_truncation_of_a_split_file_is_rejected(member, tmp_path):
    folder = split(tmp_path / "model")
    files = sorted(folder.iterdir())
    assert len(files) > 1 and pq.open(files[0])
    raw = files[member].read_bytes()
    for n in range(0, len(raw), 97):
        saved(folder, files[member].name, raw[:n])
        with pytest.raises(PolyquantError):
            for weight in pq.open(files[0]).values():
                weight.read()


def test_the_tiny_model_runs(tmp_path):
    logits = pq.load(tiny(tmp_path / "model")).logits([1, 2])
    assert logits.shape == (2, 8) and np.isfinite(logits).all()
    assert json.loads((tmp_path / "model/config.json").read_text())["num_hidden_layers"] == 1
