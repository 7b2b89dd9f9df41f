"""What formats that are folders with Hugging Face's names have in common."""

from __future__ import annotations

from polyquant.types import Checkpoint, TensorMap, Translation

__all__ = ["FolderFormat"]


class FolderFormat:
    """The half of a Format (formats.protocol) that carries names, config.json and the small files along."""

    def carry(self, checkpoint: Checkpoint) -> Translation:
        """Every file that readers know, byte for byte."""
        tensors = tuple(TensorMap(w.name, (w.name,), w.shape, keep_float=len(w.shape) < 2) for w in checkpoint.values())
        folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        paths = {**checkpoint.files, **({"config.json": folder / "config.json"} if checkpoint.config else {})}
        files = {n: p.read_bytes() for n, p in paths.items()}
        return Translation(str(checkpoint.config.get("model_type", "")), tensors, files=files)

    def plain(self, checkpoint: Checkpoint) -> Checkpoint:
        """Nothing in it is this format's alone."""
        return checkpoint
