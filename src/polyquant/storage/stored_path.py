"""Files of a model that a store keeps under their digests, as paths with the names that the model gave them.

An OCI image layout names blobs by digest; the names of the files are annotations. A StoredPath has the file's name, so
readers of formats find shards and configs next to each other, and the operating system opens the blob: `os.fspath`
returns the path of the blob. storage.stores.layouts registers the files of an image.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PosixPath

__all__ = ["Image", "StoredPath", "register"]


@dataclass(frozen=True, slots=True)
class Image:
    """The files of one model: the folder of its store, and for each file name the path of its blob."""

    folder: str
    files: Mapping[str, str]


_images: dict[str, Image] = {}
"""The text of a model's root -> its files."""


class StoredPath(PosixPath):
    """A model in an OCI image layout, "oci:/folder:tag", or a file in it. Paths derived from it are StoredPaths."""

    __slots__ = ()

    def __str__(self) -> str:
        first, *rest = self.parts or (".",)
        return f"{first}/{'/'.join(rest)}" if first == "oci:" else "/".join((first, *rest))

    def __repr__(self) -> str:
        return f"StoredPath({str(self)!r})"

    def __fspath__(self) -> str:
        image, name = self._place()
        if image is None:
            return str(self)
        return image.files.get(name) or os.path.join(image.folder, *([f"no file {name}"] if name else []))  # noqa: PTH118

    def _place(self) -> tuple[Image | None, str]:
        """The model and the name of the file in it, "" for the model itself."""
        root, name = str(self), ""
        while root not in _images:
            root, slash, last = root.rpartition("/")
            if not slash:
                return None, ""
            name = f"{last}/{name}" if name else last
        return _images[root], name

    def absolute(self) -> StoredPath:
        """Return the path itself."""
        return self

    def resolve(self, strict: bool = False) -> StoredPath:
        """Return the path itself: a blob has no other name."""
        if strict and not self.exists():
            raise FileNotFoundError(f"{self} does not exist")
        return self

    def is_symlink(self) -> bool:
        """Return False."""
        return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return True for a model, and for a folder of its files."""
        image, name = self._place()
        return image is not None and (not name or any(n.startswith(f"{name}/") for n in image.files))

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Return True for a file or a folder of the model."""
        return self.is_dir() or self.is_file()

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return True for a file of the model whose blob exists."""
        image, name = self._place()
        return image is not None and name in image.files and Path(image.files[name]).is_file()

    def iterdir(self) -> Iterator[StoredPath]:  # type: ignore[override] # narrower than Path's
        """Yield the files and folders in this folder, sorted."""
        image, name = self._place()
        before = f"{name}/" if name else ""
        inside = () if image is None else (n[len(before) :] for n in image.files if n.startswith(before))
        return (self / entry for entry in sorted({n.partition("/")[0] for n in inside}))


def register(root: str, image: Image) -> StoredPath:
    """Return the path of a model. root: its text, "oci:/folder:tag"."""
    _images[root] = image
    return StoredPath(root)
