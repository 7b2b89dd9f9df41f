"""Limits on untrusted files, in one place. A file beyond them is refused with a one-line error.

Each is far above what real models need, and low enough that a hostile file costs less than a second and 200 MB.
"""

from __future__ import annotations

GGUF_KEYS = 65_536
"""Metadata entries of one GGUF file (real ones: under 100)."""
GGUF_TENSORS = 65_536
"""Tensors of one GGUF file (real ones: under 60,000, with separate experts)."""
GGUF_KEY_BYTES = 65_535
GGUF_STRING_BYTES = 64 << 20
GGUF_ARRAY_DEPTH = 4
"""Nesting depth of arrays; other readers support one level."""
GGUF_NESTED_ARRAYS = 16_384
"""Number of nested arrays, which are parsed in Python."""
GGUF_DIMENSIONS = 4
GGUF_NAME_BYTES = 63
"""llama.cpp stores tensor names in 64 bytes, including the final zero."""
GGUF_ALIGNMENT = (8, 1 << 20)
"""Smallest and largest alignment; powers of two."""
GGUF_SPLIT_FILES = 4_096
EMPTY_EXTENT = 1 << 20
"""Product of the other dimensions of an empty tensor: no bytes pay for the time and memory that its rows take."""
REMOTE_HEADER = 128 << 20
"""Bytes of a header that is read from a URL; a local one is mapped."""
