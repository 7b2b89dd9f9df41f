"""The jobs that write, each with the previous content of its target.

Words of a command: {top} is the folder that the job writes to, {in} one with inputs that no job changes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import polyquant
from formats.msmodelslim_folders import copy, edit_tensors
from golden import VECTORS
from polyquant.architectures.find import by_name
from polyquant.msmodelslim.pair import write_pair
from polyquant.storage import renames, work_folder
from polyquant.testing.architectures import tiny_model

__all__ = ["FOREIGN", "QUICK", "UNSYNCED", "VERBS", "Files", "Job", "Verb", "make_inputs"]

QUANT_BIAS = "model.layers.0.self_attn.k_proj.quant_bias"

FOREIGN = {
    "notes.txt": b"precious",
    ".m.gguf.partial": b"precious",
    ".m.gguf.polyquant-0123456789abcdef/journal": b"precious",
    "data/m.gguf": b"precious",
}
"""Files of the user next to the target."""

Files = dict[str, bytes]
Job = tuple[str, ...] | Callable[[Path, Path], object]


def _never(seen: Files) -> bool:
    return False


def _without_first(seen: Files) -> bool:
    """A split model is opened by its first file, so without it nothing looks whole."""
    return not any("-00001-of-" in name for name in seen)


def _without_manifest(seen: Files) -> bool:
    """A store may have blobs and folders that no manifest names."""
    return not any("/manifests/" in name and not name.endswith("/") for name in seen) and _whole_blobs(seen)


def _old_manifest(seen: Files) -> bool:
    """The manifest is the old one, and the store may have the blobs of the new one."""
    return _whole_blobs(seen) and all(
        b"num_ctx" not in data and data.count(b"image.params") == 0
        for name, data in seen.items()
        if "/manifests/" in name
    )


def _without_tag(seen: Files) -> bool:
    """A layout may have blobs that its index does not name; the index is complete or not there."""
    return not any(name.endswith("index.json") for name in seen) and _whole_blobs(seen)


def _whole_blobs(seen: Files) -> bool:
    return all(
        hashlib.sha256(data).hexdigest() == name[-64:]
        for name, data in seen.items()
        if "/blobs/" in name and not name.endswith("/")
    )


def _without_target(seen: Files) -> bool:
    """Without an exchange of names, a replaced folder is missing for a moment."""
    return seen == FOREIGN


def _as_before() -> None:
    pass


def _no_exchange() -> None:
    work_folder.exchange = lambda a, b: False


def _no_renameat2() -> None:
    renames._rename = lambda old, new, how: False


def _no_sync() -> None:
    work_folder.sync_folder = lambda path: None


def _no_kernel_copy() -> None:
    def refused(*_: Any) -> int:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    os.copy_file_range = refused


@dataclass(frozen=True, slots=True)
class Verb:
    """job: words of a command, or a function of top and in. old: the command that made the previous content.

    partly: states other than the old and the new content that are allowed after a kill. system: removes an ability of
    the operating system. atomic: all writes are within one page, which a kill cannot split.
    """

    job: Job
    old: Job | None = None
    partly: Callable[[Files], bool] = _never
    system: Callable[[], None] = _as_before
    atomic: bool = False


def make_inputs(folder: Path) -> None:
    """Write the models and the calibration samples that the jobs read."""
    folder.mkdir()
    llama = by_name("llama")
    assert llama is not None
    for seed, name in enumerate(("new", "old")):
        tiny_model(llama, folder / name, seed=seed)
        polyquant.convert(folder / name, folder / f"{name}.gguf", threads=1)
    rng = np.random.default_rng(5)
    for i in (1, 3):
        (folder / f"machine{i}").mkdir()
        polyquant.convert(folder / "new", folder / f"machine{i}/m.gguf", codec="q8_0", threads=1, part=f"{i}/3")
    (folder / "text.json").write_text(json.dumps([rng.integers(0, 32, 64).tolist() for _ in range(2)]))
    edit_tensors(copy("v0/fp16/w8a8", folder), _without_quant_bias)
    (folder / "model").rename(folder / "broken")


def _without_quant_bias(tensors: dict[str, np.ndarray]) -> None:
    del tensors[QUANT_BIAS]


def _arrays(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((4, 64), np.float32) for name in ("a.weight", "b.weight")}


def _save(name: str, seed: int, **options: Any) -> Callable[[Path, Path], object]:
    return lambda top, _: polyquant.save(_arrays(seed), top / name, threads=1, **options)


def _pair(top: Path, _: Path) -> None:
    write_pair(top / "pair", _arrays(1), {"a.weight": "FLOAT", "b.weight": "FLOAT"}, "w8a16")


def _gguf(name: str, *more: str) -> tuple[str, ...]:
    return ("convert", f"{{in}}/{name}", "{top}/m.gguf", "--codec", "q8_0", "--threads", "1", *more)


def _parts(
    name: str, *, sources: bool = False, overwrite: bool = False, **options: Any
) -> Callable[[Path, Path], object]:
    """Make all three parts, and merge them; sources: parts 1 and 3 were made on other machines."""

    def job(top: Path, inputs: Path) -> None:
        for i in (2,) if sources else (3, 1, 2):
            part = f"{i}/3"
            polyquant.convert(inputs / "new", top / name, part=part, overwrite=overwrite, threads=1, **options)
        others = [inputs / "machine1", inputs / "machine3"] if sources else []
        polyquant.merge(top / name, others, overwrite=overwrite)

    return job


def _folder(name: str, *more: str) -> tuple[str, ...]:
    return ("convert", f"{{in}}/{name}", "{top}/model", "--codec", "f16", "--threads", "1", *more)


def _importance(*more: str) -> tuple[str, ...]:
    return ("importance", "{in}/new", "{top}/imatrix.gguf", "--calibration", "{in}/text.json", *more)


def _embed(text: str, *more: str) -> tuple[str, ...]:
    return ("embed", str(VECTORS / "architectures/bert"), text, "--format", "npy", "--output", "{top}/x.npy", *more)


def _checksum(name: str, *more: str) -> tuple[str, ...]:
    return ("checksum", f"{{in}}/{name}.gguf", "--output", "{top}/sums.json", *more)


def _copied(name: str) -> Callable[[Path, Path], object]:
    return lambda top, inputs: shutil.copyfile(inputs / name, top / "m.gguf")


def _ollama(name: str, *more: str) -> tuple[str, ...]:
    return ("pack", f"{{in}}/{name}.gguf", "--ollama", "{top}/store", "--name", "m", "--host", "h", *more)


def _oci(name: str, *more: str) -> tuple[str, ...]:
    return ("pack", f"{{in}}/{name}", "--oci", "{top}/layout", "--name", "m", *more)


_TRELLIS = ("--codec", "trellis.2.mul1.12", "--threads", "1")
_W8A8 = ("--codec", "w8a8", "--calibration", "{in}/text.json", "--threads", "1")
_SPLIT = ("--shard-size", "60000")
_LONGER = ("--set", "general.name:str=" + "x" * 5000)
_SHORT = ("--set", "llama.context_length=64")

VERBS = {
    "gguf": Verb(_gguf("new")),
    "gguf-overwrite": Verb(_gguf("new", "--overwrite"), _gguf("old")),
    "split": Verb(_gguf("new", *_SPLIT), partly=_without_first),
    "split-overwrite": Verb(_gguf("new", *_SPLIT, "--overwrite"), _gguf("old", *_SPLIT), partly=_without_first),
    "folder": Verb(_folder("new")),
    "folder-sharded": Verb(_folder("new", *_SPLIT)),
    "folder-overwrite": Verb(_folder("new", "--overwrite"), _folder("old", *_SPLIT)),
    "trellis": Verb(("convert", "{in}/new", "{top}/v3", *_TRELLIS)),
    "trellis-overwrite": Verb(
        ("convert", "{in}/new", "{top}/v3", *_TRELLIS, "--overwrite"), ("convert", "{in}/old", "{top}/v3", *_TRELLIS)
    ),
    "msmodelslim": Verb(("convert", "{in}/new", "{top}/w8a8", "--to", "msmodelslim", *_W8A8)),
    "quantize": Verb(("quantize", "{in}/new", "{top}/m.gguf", "--threads", "1")),
    "quantize-msmodelslim": Verb(("quantize", "{in}/new", "{top}/w8", "--to", "msmodelslim", "--threads", "1")),
    "parts": Verb(_parts("m.gguf", codec="q8_0")),
    "parts-overwrite": Verb(_parts("m.gguf", codec="q8_0", overwrite=True), _gguf("old")),
    "parts-folder": Verb(_parts("model", codec="f16", to="hf", shard_bytes=60000)),
    "parts-copied": Verb(_parts("m.gguf", codec="q8_0", sources=True)),
    "edit-page": Verb(("edit", "{top}/m.gguf", *_SHORT), _copied("new.gguf"), atomic=True),
    "edit": Verb(("edit", "{top}/m.gguf", *_LONGER), _copied("new.gguf")),
    "edit-no-kernel-copy": Verb(("edit", "{top}/m.gguf", *_LONGER), _copied("new.gguf"), system=_no_kernel_copy),
    "edit-copy": Verb(("edit", "{in}/new.gguf", *_LONGER, "--output", "{top}/m.gguf")),
    "edit-copy-overwrite": Verb(
        ("edit", "{in}/new.gguf", *_LONGER, "--output", "{top}/m.gguf", "--overwrite"), _copied("old.gguf")
    ),
    "repair": Verb(("repair", "{in}/broken", "{top}/repaired")),
    "repair-overwrite": Verb(
        ("repair", "{in}/broken", "{top}/repaired", "--overwrite"),
        ("repair", "{in}/broken", "{top}/repaired", "--dialect", "v1"),
    ),
    "importance": Verb(_importance()),
    "importance-overwrite": Verb(_importance("--overwrite"), _importance("--windows", "1")),
    "checksum": Verb(_checksum("new")),
    "checksum-overwrite": Verb(_checksum("new", "--overwrite"), _checksum("old")),
    "checksum-list": Verb(_checksum("new", "--sha256")),
    "embed": Verb(_embed("the word")),
    "embed-overwrite": Verb(_embed("the word", "--overwrite"), _embed("of the lord")),
    "save-gguf": Verb(_save("m.gguf", 1)),
    "save-gguf-hardlink": Verb(_save("m.gguf", 1), system=_no_renameat2),
    "save-gguf-overwrite": Verb(_save("m.gguf", 1, overwrite=True), _save("m.gguf", 2)),
    "save-split": Verb(_save("m.gguf", 1, shard_bytes=1500), partly=_without_first),
    "save-split-overwrite": Verb(
        _save("m.gguf", 1, shard_bytes=1500, overwrite=True),
        _save("m.gguf", 2, shard_bytes=1500),
        partly=_without_first,
    ),
    "save-folder": Verb(_save("model", 1)),
    "save-folder-overwrite": Verb(_save("model", 1, overwrite=True), _save("model", 2)),
    "save-folder-hardlink": Verb(_save("model", 1), system=_no_renameat2),
    "save-folder-two-steps": Verb(
        _save("model", 1, overwrite=True), _save("model", 2), partly=_without_target, system=_no_exchange
    ),
    "pack": Verb(_ollama("new", "--param", "num_ctx=64"), partly=_without_manifest),
    "pack-overwrite": Verb(
        _ollama("new", "--param", "num_ctx=64", "--overwrite"), _ollama("old"), partly=_old_manifest
    ),
    "pack-link": Verb(
        ("pack", "{top}/m.gguf", *_ollama("new")[2:], "--link", "--overwrite"),
        _copied("new.gguf"),
        partly=_without_manifest,
    ),
    "pack-layout": Verb(_oci("new.gguf"), partly=_without_tag),
    "pack-layout-overwrite": Verb(_oci("new.gguf", "--overwrite"), _oci("old.gguf"), partly=_whole_blobs),
    "pair": Verb(_pair),
}

QUICK = tuple(name for name in VERBS if name.startswith(("save", "edit", "pair")))
"""Jobs of few calls, which together cover every way to publish."""

UNSYNCED = {
    name: Verb(VERBS[of].job, VERBS[of].old, VERBS[of].partly, system=_no_sync)
    for name, of in (("unsynced-file", "save-gguf-overwrite"), ("unsynced-split", "save-split-overwrite"))
}
"""Jobs that do not sync folders, which is wrong."""
