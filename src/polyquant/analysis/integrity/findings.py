"""The finding codes of checksums."""

from __future__ import annotations

__all__ = ["CODES"]

CODES = {
    "SUM001": "The weights of a tensor are not those of its checksum: bits changed on the disk or in a transfer, or "
    "the model was changed after its checksums were written. If another tensor's content is there, it is named. "
    "Copy the file again. After an intended change, write new checksums with `polyquant checksum --overwrite`.",
    "SUM002": "A tensor that has a checksum is missing in the model.",
    "SUM003": "A tensor of the model has no checksum: it was added after the checksums were written.",
    "SUM004": "A file is not the one of its checksum: its size or its SHA-256 differs. If the file holds tensors, the "
    "changed ones are reported as SUM001. Copy the file again; after an intended change, write new checksums.",
    "SUM005": "A file is not the one of its checksum, but all tensors in it are equal: its header, its metadata or its "
    "padding changed, as by `polyquant edit`. The weights are those of the checksums, the behaviour may differ: check "
    "hyper-parameters and the tokenizer.",
    "SUM006": "A file that has a checksum is missing or cannot be read. Finish the download, or copy the file again.",
    "SUM007": "A file of checksums cannot be used: it is damaged, was changed, contradicts itself or has an "
    "unsupported version. Nothing was checked against it.",
    "SUM008": "The stored bytes of a tensor changed, but its weights are equal: the change is in padding, or in bits "
    "that no reader uses. The file is damaged nevertheless: copy it again.",
    "SUM009": "A tensor has another name than in the checksums, with the same content.",
    "SUM010": "The files of the model have other names than those in the checksums, so only tensors were compared.",
}
