"""Push a model to a repository of the hub: its files and a model card; other files of its folder stay."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyquant.analysis.integrity.files import model_files
from polyquant.analysis.model_card import Uploaded, model_card, read_report
from polyquant.errors import InputError, PlanError
from polyquant.opening import detect, open_sound
from polyquant.registry import Search
from polyquant.storage import folder as folders
from polyquant.storage.locations import RemotePath, is_folder, located
from polyquant.types import Checkpoint

__all__ = ["Push", "prepare_push", "push"]

CARD = "README.md"
_UPLOAD = Search("polyquant.storage.remote.hub_upload:upload")


@dataclass(frozen=True, slots=True)
class Push:
    """An upload. files: name -> path, without the card; skipped: other files of the folder.

    changed, url: the files of the commit and its address, once it is made.
    """

    target: RemotePath
    files: Mapping[str, Path]
    card: str
    skipped: tuple[str, ...] = ()
    changed: tuple[str, ...] = field(default=())
    url: str = ""

    def to_json(self) -> dict[str, Any]:
        """The values as JSON-compatible types."""
        return {
            "target": str(self.target),
            "files": {name: path.stat().st_size for name, path in self.files.items()},
            "skipped": list(self.skipped),
            "changed": list(self.changed),
            "url": self.url,
            "card": self.card,
        }


def prepare_push(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    base_model: str | None = None,
    report: str | os.PathLike[str] | None = None,
) -> Push:
    """Check the model at `path`, and make its card. Nothing is sent. Raises InputError, PlanError.

    path: a model, or a folder of GGUF files. base_model: "org/name"; report: the JSON of the conversion.
    """
    where, to = located(path), located(target)
    if isinstance(where, RemotePath):
        raise PlanError("only local models are pushed", file=where)
    if not isinstance(to, RemotePath) or to.scheme != "hf" or len(to.parts) != 3:
        raise PlanError("only a repository of the hub is a target", file=to, expected="hf://org/name[@revision]")
    repo = f"{to.parts[1]}/{to.parts[2].partition('@')[0]}"
    files: dict[str, Path] = {}
    models = []
    for one in _models(where):
        if one.name in files:  # another file of the same split model
            continue
        checkpoint, own = _checked(one)
        files |= own
        nbytes = sum(p.stat().st_size for p in own.values())
        models.append(Uploaded(detect(one)[0], checkpoint, "" if is_folder(one) else one.name, nbytes))
    base = where if is_folder(where) else where.parent
    sizes = {name: p.stat().st_size for name, p in files.items()}
    known = read_report(located(report)) if report is not None else None
    card = model_card(repo, models, sizes, base_model=base_model, report=known)
    skipped: tuple[str, ...] = ()
    if is_folder(where):
        written = folders.member(base, CARD)
        card = written.read_text(encoding="utf-8", errors="replace") if written is not None else card
        tops = {name.partition("/")[0] for name in files}
        skipped = tuple(n for n in folders.entries(base) if n not in tops and n != CARD)
    return Push(to, files, card, skipped)


def push(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    base_model: str | None = None,
    report: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    private: bool = False,
) -> Push:
    """Upload a model and its card in one commit. Raises InputError, PlanError, RemoteError.

    Files of the repository that differ are only replaced with `overwrite`. private: for a repository that is created.
    """
    ready = prepare_push(path, target, base_model=base_model, report=report)
    contents: dict[str, Path | bytes] = {**ready.files, CARD: ready.card.encode()}
    message = f"Upload {located(path).name} with polyquant"
    url, changed = _UPLOAD(contents, ready.target, overwrite=overwrite, private=private, message=message)
    return Push(ready.target, ready.files, ready.card, ready.skipped, tuple(changed), url)


def _models(where: Path) -> list[Path]:
    """The model itself, or the files of a folder that holds a model each (GGUF)."""
    try:
        detect(where)
    except InputError:
        singles = [where / n for n in folders.entries(where) if n.endswith(".gguf")] if is_folder(where) else []
        if not singles:
            raise
        return [p for p in singles if folders.member(where, p.name) is not None]
    return [where]


def _checked(path: Path) -> tuple[Checkpoint, dict[str, Path]]:
    """Open a model whose headers are sound; its files, by name in the repository."""
    form, _ = detect(path)
    checkpoint = open_sound(form, path, {})
    files = model_files(checkpoint)
    if outside := [name for name in files if not name or name.startswith("/")]:
        raise InputError("a file of the model is outside its folder", file=path, found=outside[0])
    return checkpoint, files
