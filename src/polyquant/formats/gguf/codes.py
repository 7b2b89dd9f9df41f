"""Explanations of the findings about GGUF files (`polyquant explain CODE`). The meaning of a code never changes."""

from __future__ import annotations

__all__ = ["CODES"]

_COPY_AGAIN = "Copy or download the file again and compare its size with the original."

CODES: dict[str, str] = {
    "GGUF001": "The file does not start with the bytes GGUF, or is shorter than a header. It is another format, or the "
    "download saved an error page or a pointer file. " + _COPY_AGAIN,
    "GGUF002": "The version number is not 1, 2 or 3. No reader supports such a file: it uses a later version or is "
    "damaged.",
    "GGUF003": "The header ends in the middle of a key, a value or a tensor entry. Nothing after that point can be "
    "read. " + _COPY_AGAIN,
    "GGUF004": "The header claims more keys, tensors, array items or string bytes than the rest of the file could "
    "hold, or more than polyquant's limits allow. The file is incomplete (an interrupted download?), damaged or "
    "malicious; it is rejected before any memory is allocated.",
    "GGUF005": "A metadata key is the empty string. llama.cpp rejects the file. Rewrite it with the tool that created "
    "it.",
    "GGUF006": "Two metadata entries have the same key. llama.cpp rejects the file; other readers use one of the two "
    "values, but not the same one. `polyquant edit --remove KEY` cannot distinguish them: rewrite the file with the "
    "tool that created it.",
    "GGUF007": "A key or a tensor name is not UTF-8 text. Readers decode it differently. Rewrite the file.",
    "GGUF008": "A value has a type number that GGUF does not define (0 to 12). Its size is unknown, so nothing after "
    "it can be read.",
    "GGUF009": "An array has arrays as items. llama.cpp rejects the file, gguf-py flattens the value. polyquant reads "
    "it; after `polyquant edit FILE --remove KEY` every reader opens the file.",
    "GGUF010": "Arrays are nested more than four deep, or there are tens of thousands of nested arrays. No model needs "
    "that; the file is rejected.",
    "GGUF011": "general.alignment is not a power of two between 8 and 1 MiB. llama.cpp rejects alignments that are not "
    "a power of two, and data offsets cannot be trusted.",
    "GGUF012": "general.alignment is not stored as uint32. llama.cpp rejects the file. Rewrite it with the tool that "
    "created it.",
    "GGUF013": "A tensor name has 64 bytes or more. llama.cpp stores names in 64 bytes including a final zero and "
    "rejects the file. `polyquant edit` can rename the tensor.",
    "GGUF014": "Two tensors have the same name. llama.cpp rejects the file; other readers lose one of the two.",
    "GGUF015": "A tensor has more than four dimensions. llama.cpp rejects the file.",
    "GGUF016": "The number of elements or bytes of a tensor overflows a signed 64-bit integer. The file is damaged or "
    "malicious.",
    "GGUF017": "The rows of a tensor are not a multiple of its type's block size, so the type cannot store them. The "
    "shape or the type is wrong.",
    "GGUF018": "A tensor's data offset is not the sum of the padded sizes of the tensors before it. llama.cpp requires "
    "that and rejects the file. Also seen if the file is read in another program's dialect: see --dialect.",
    "GGUF019": "The data of two tensors overlap. At least one of them is wrong.",
    "GGUF020": "A tensor's data is past the end of the file: the file is truncated. " + _COPY_AGAIN,
    "GGUF021": "There are bytes after the last tensor. Readers ignore them; they may be a second file or a failed "
    "write.",
    "GGUF022": "The last tensor is not padded to the alignment. llama.cpp reads padded tensors when it loads without "
    "mmap, which then fails. `polyquant edit FILE COPY` writes a padded file.",
    "GGUF023": "A tensor's type number is unknown in this dialect. Its size was taken from the next tensor's offset; "
    "it can be copied, not decoded.",
    "GGUF024": "Version 1 of the format, with 32-bit counts. llama.cpp and gguf-py no longer read it. `polyquant edit "
    "FILE COPY` writes version 3.",
    "GGUF025": "Version 2 of the format. Every reader supports it; `polyquant edit` writes version 3.",
    "GGUF026": "The file is big-endian. llama.cpp reads it only on big-endian machines. polyquant reads it everywhere, "
    "and converting writes little-endian.",
    "GGUF027": "general.architecture is missing or not a string. llama.cpp cannot load a model without it. `polyquant "
    "edit FILE --set general.architecture:str=llama` adds it.",
    "GGUF028": "Parallel arrays of the tokenizer (tokens, scores, token types) have different lengths. llama.cpp may "
    "read past an end or reject the file.",
    "GGUF029": "A string value is not UTF-8 text. gguf-py and other Python readers fail on it; llama.cpp does not "
    "check.",
    "GGUF030": "A bool is stored as a number other than 0 or 1. It is read as true here; strict readers differ.",
    "GGUF031": "A tensor has a dimension of zero. Some versions of llama.cpp divide by it. Omit the tensor.",
    "GGUF032": "The files of a split model are inconsistent: one is missing, misnumbered, or repeats a tensor. Put all "
    "files of one download into one folder under their original names.",
    "GGUF033": "A special token's id is outside the vocabulary. Generation fails or never ends. `polyquant edit` can "
    "set it.",
    "GGUF034": "The file contains I2_S weights. The bytes do not distinguish the x86 layout from the ARM layout; x86 "
    "is assumed, as in all published files. If the output is fluent nonsense, try --ternary-layout i2_s.arm.",
    "GGUF035": "A tensor's name is empty, so it cannot be looked up.",
    "GGUF036": "The file contains no tensors: a vocabulary, an adapter's metadata, or the first file of a split model.",
    "GGUF037": "A scale next to an NVFP4 weight (X.scale, X.input_scale) does not fit it: llama.cpp reads float32 [1], "
    "and for a stack of experts one for each. Without the scale the weights would be wrong: the file can only be "
    "inspected.",
}
