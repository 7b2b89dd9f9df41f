"""Check a model against its checksums, and compare the checksums of two models.

Files are hashed first. A file with its digest is the recorded one, so its tensors are too; the tensors of other files
are hashed to find those that changed. Names in files of checksums are untrusted: only files of the model, or inside its
folder, are opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from polyquant.analysis.integrity.content import TensorDigest
from polyquant.analysis.integrity.files import FileDigest, model_files, read_list, root_of
from polyquant.analysis.integrity.hashing import file_names, hash_all
from polyquant.analysis.integrity.record import Checksums, is_record, record_of
from polyquant.errors import InputError, listed, printable
from polyquant.findings import Finding, Severity
from polyquant.formats.steps import Progress
from polyquant.storage.folder import entries, inner_name, member, subfolder
from polyquant.storage.locations import is_remote
from polyquant.types import Checkpoint

__all__ = ["Recorded", "checksum_findings", "compare_tensors", "read_recorded"]

_LISTS = ("sha256sums", "sha256sums.txt", "sha256sum.txt")
"""Names of SHA-256 lists, in lower case."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The checksums next to a model: at most one record, SHA-256 lists by path, and files that could not be read."""

    record: Checksums | None = None
    lists: Mapping[Path, Mapping[str, str]] = field(default_factory=dict)
    broken: tuple[Finding, ...] = ()

    def __bool__(self) -> bool:
        return self.record is not None or bool(self.lists)


def read_recorded(path: Path, given: Path | None) -> Recorded:
    """Read `given`, a record or a list, or the files next to the model: its record, SHA256SUMS and NAME.sha256."""
    if given is not None:
        if is_record(given):
            return Recorded(Checksums.read(given))
        return Recorded(lists={given: read_list(given)})
    broken: list[Finding] = []
    record, lists = None, {}
    place = record_of(path)
    if place.exists() if is_remote(place) else os.path.lexists(place):
        try:
            record = Checksums.read(place)
        except InputError as problem:
            broken.append(_unusable(place, problem))
    for place in _lists(path):
        try:
            lists[place] = read_list(place)
        except InputError as problem:
            broken.append(_unusable(place, problem))
    return Recorded(record, lists, tuple(broken))


def _unusable(place: Path, problem: InputError) -> Finding:
    bare = InputError(problem.message, expected=problem.expected, found=problem.found, hint=problem.hint)
    return Finding("SUM007", Severity.ERROR, str(bare), file=place.name)


def _lists(path: Path) -> list[Path]:
    """SHA-256 lists next to a model; of a folder that holds one model file, only the lists that may name it."""
    root = root_of(path)
    own = None if path.is_dir() else f"{path.name}.sha256"
    try:
        names = entries(root)
    except InputError:  # the model itself was readable: a folder without permission to list
        return []
    return [
        root / n for n in names if n.lower() in _LISTS or (n.endswith(".sha256") if own is None else n == own)
    ]  # fmt: skip


def checksum_findings(
    path: Path,
    checkpoint: Checkpoint | None,
    recorded: Recorded,
    *,
    threads: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Iterator[Finding]:
    """The differences between a model and its checksums. checkpoint: None if it cannot be opened."""
    yield from recorded.broken
    if not recorded:
        return
    own = model_files(checkpoint) if checkpoint is not None else {} if path.is_dir() else {path.name: path}
    record = recorded.record
    expected = _expected(path, own, recorded)
    if record is not None and not any(source == record.path.name for _, source, _ in expected):
        yield Finding("SUM010", Severity.NOTE, f"the files of the checksums have other names: {listed(record.files)}")
    places = {name: place for name, _, _ in expected if (place := _place(path, own, name)) is not None}
    digests, _ = hash_all(places, threads=threads, on_progress=on_progress)
    changed: dict[str, str] = {}
    for name, source, wanted in expected:
        if name not in places:
            yield Finding("SUM006", Severity.ERROR, f"is missing or cannot be read; {source} lists it", file=name)
        elif (message := _differs(digests[name], wanted, source)) is not None:
            changed.setdefault(name, message)
    tensors: dict[str, list[str]] = {}
    if checkpoint is not None and record is not None:
        intact = {name for name in places if name in record.files and name not in changed}
        for finding in _tensor_findings(checkpoint, record, own, intact, threads, on_progress):
            tensors.setdefault(finding.file or "", []).append(finding.tensor or "")
            yield finding
    for name, message in changed.items():
        yield _file_finding(name, message, tensors.get(name, []), record if checkpoint is not None else None)


def _expected(path: Path, own: Mapping[str, Path], recorded: Recorded) -> list[tuple[str, str, FileDigest | str]]:
    """(file, name of the source, digest); none from a record if the model has none of its files."""
    out: list[tuple[str, str, FileDigest | str]] = []
    record = recorded.record
    if record is not None and any(_place(path, own, name) is not None for name in record.files):
        out += [(name, record.path.name, digest) for name, digest in record.files.items()]
    for place, digests in recorded.lists.items():
        out += [(name, place.name, text) for name, text in digests.items() if path.is_dir() or name in own]
    return out


def _place(path: Path, own: Mapping[str, Path], name: str) -> Path | None:
    """The path of a listed file: one of the model's, or a regular file inside its folder; else None."""
    if name in own:
        return own[name]
    if not path.is_dir() or not inner_name(name):
        return None
    folder, _, plain = name.rpartition("/")
    try:
        place = member(subfolder(path, folder) if folder else path, plain)
    except InputError:
        return None
    return place if place is not None and os.access(place, os.R_OK) else None


def _differs(digest: FileDigest, wanted: FileDigest | str, source: str) -> str | None:
    """The difference between a file and its checksum, or None."""
    if isinstance(wanted, FileDigest) and wanted.size != digest.size:
        return f"has {digest.size:,} bytes, {source} lists {wanted.size:,}"
    text = wanted.sha256 if isinstance(wanted, FileDigest) else wanted
    return None if text == digest.sha256 else f"SHA-256 is {digest.sha256}, {source} lists {text}"


def _file_finding(name: str, message: str, tensors: list[str], record: Checksums | None) -> Finding:
    """The finding for a changed file. tensors: those that changed in it; record: None if they were not compared."""
    count = 0 if record is None else sum(t.file == name for t in record.tensors.values())
    if count and not tensors:
        text = f"all {count:,} tensors are equal, the header, the metadata or the padding is not: {message}"
        return Finding("SUM005", Severity.WARNING, text, file=name)
    which = f"; changed: {listed(tensors)}" if tensors else ""
    return Finding("SUM004", Severity.ERROR, message + which, file=name)


def _tensor_findings(
    checkpoint: Checkpoint,
    record: Checksums,
    own: Mapping[str, Path],
    intact: set[str],
    threads: int | None,
    on_progress: Callable[[Progress], None] | None,
) -> Iterator[Finding]:
    """Differences of tensors; those in intact files are the recorded ones."""
    held = file_names(checkpoint.values(), own)
    known = {
        name
        for name, files in held.items()
        if files is not None and intact.issuperset(files) and name in record.tensors
        and record.tensors[name].file in files
    }  # fmt: skip
    places = {name: (files or [""])[0] for name, files in held.items()}
    suspects = [w for w in checkpoint.values() if w.name not in known]
    _, digests = hash_all({}, suspects, places, threads=threads, on_progress=on_progress)
    current = {name: record.tensors[name] if name in known else digests[name] for name in held}
    yield from compare_tensors(record.tensors, current, stored=True)


def compare_tensors(
    recorded: Mapping[str, TensorDigest], current: Mapping[str, TensorDigest], *, stored: bool
) -> Iterator[Finding]:
    """Differences between two sets of tensors by name; equal contents under other names are notes.

    stored: also compare the stored bytes of tensors with the same codec.
    """
    renamed = _renamed(recorded, current)
    contents = {t.content: name for name, t in recorded.items()}
    for name, was in recorded.items():
        now = current.get(name)
        if now is None:
            if name not in renamed:
                yield Finding("SUM002", Severity.ERROR, "no tensor has this name or content", name, was.file)
        elif now.content != was.content:
            yield Finding("SUM001", Severity.ERROR, _change(was, now, contents.get(now.content)), name, now.file)
        elif stored and now.codec == was.codec and now.stored != was.stored:
            message = "its weights are equal, its stored bytes are not: padding or unused bits changed"
            yield Finding("SUM008", Severity.WARNING, message, name, now.file)
    back = {new: old for old, new in renamed.items()}
    for name, now in current.items():
        if name in back:
            yield Finding("SUM009", Severity.NOTE, f"is called {printable(back[name], 120)} in the checksums", name)
        elif name not in recorded:
            yield Finding("SUM003", Severity.ERROR, "no checksum has this name or content", name, now.file)


def _renamed(recorded: Mapping[str, TensorDigest], current: Mapping[str, TensorDigest]) -> dict[str, str]:
    """Old name -> new name of tensors that only differ by their names."""
    free: dict[str, list[str]] = {}
    for name, digest in current.items():
        if name not in recorded:
            free.setdefault(digest.content, []).append(name)
    out = {}
    for name, digest in recorded.items():
        if name not in current and free.get(digest.content):
            out[name] = free[digest.content].pop(0)
    return out


def _change(was: TensorDigest, now: TensorDigest, other: str | None) -> str:
    """The message for a tensor whose content changed."""
    if other is not None:
        return f"holds the content of {printable(other, 120)}"
    if was.shape != now.shape:
        return f"its shape is {list(now.shape)}, its checksum is of {list(was.shape)}"
    if now.form == "stored" != was.form:
        return f"its codes ({printable(now.codec, 60)}) can no longer be unpacked"
    if was.codec != now.codec:
        hint = "; another --ternary-layout?" if was.form == now.form == "ternary" else ""
        return f"its content is not that of its checksum ({printable(was.codec, 60)}), read as {now.codec}{hint}"
    return f"its content is {now.content[:16]}..., its checksum {was.content[:16]}..."
