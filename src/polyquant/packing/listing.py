"""The models of a store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polyquant.errors import PlanError, PolyquantError
from polyquant.storage.stores import layouts
from polyquant.storage.stores import ollama as stores
from polyquant.tables import Row

__all__ = ["Stored", "stored"]


@dataclass(frozen=True, slots=True)
class Stored:
    """One model of a store. reference: the argument that names it; nbytes: of its layers; detail: family, parameters
    and file type; problem: why it cannot be read, "" if it can.
    """

    name: str
    reference: str
    nbytes: int
    detail: str
    problem: str = ""

    def rows(self) -> list[Row]:
        """One row: name, reference, bytes, detail, problem."""
        return [{"name": self.name, "reference": self.reference, "bytes": self.nbytes, "detail": self.detail,
                 "problem": self.problem}]  # fmt: skip


def stored(*, ollama: str | os.PathLike[str] | None = None, oci: str | os.PathLike[str] | None = None) -> list[Stored]:
    """List the models of Ollama's store (by default the one of this user) or of an OCI image layout.

    A model with a broken manifest is listed with its problem. Raises InputError for a folder that is not a store.
    """
    if oci is not None and ollama is not None:
        raise PlanError("exactly one store can be listed")
    if oci is not None:
        return list(_layout(Path(oci)))
    store = Path(ollama) if ollama is not None else stores.usual_store()
    stores.refuse_other(store)
    return list(_ollama(store))


def _ollama(store: Path) -> Iterator[Stored]:
    host = stores.host_of(store)
    for name, path in stores.models(store):
        shown = str(name).removeprefix(f"{host}/").removeprefix("library/") if name.host == host else str(name)
        try:
            model = stores.read(store, name)
            stores.weights(model)
            config = stores.config_of(model)
            words = (config.get(key) for key in ("model_family", "model_type", "file_type"))
            detail = " ".join(w for w in words if isinstance(w, str) and w)
        except PolyquantError as error:
            yield Stored(shown, str(path), 0, "", str(error))
            continue
        reference = f"ollama:{shown}" if store.absolute() == stores.usual_store().absolute() else str(path)
        yield Stored(shown, reference, model.manifest.nbytes, detail)


def _layout(folder: Path) -> Iterator[Stored]:
    layouts.refuse_other(folder)
    for tagged in layouts.tags(folder):
        reference = f"oci:{folder}:{tagged.tag}"
        try:
            files = layouts.files_of(tagged)
            count = "1 file" if len(files) == 1 else f"{len(files)} files"
            yield Stored(tagged.tag, reference, sum(d.size for d in files.values()), count)
        except PolyquantError as error:
            yield Stored(tagged.tag, reference, 0, "", str(error))
