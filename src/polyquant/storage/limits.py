"""The limits on what an untrusted file may claim, in one place. Beyond these a file is refused with one line.

Each is far above what real models need and low enough that a hostile file costs less than a second and 200 MB.
"""

from __future__ import annotations

GGUF_KEYS = 65_536
"""Metadata entries of one GGUF file (real ones: under 100)."""
GGUF_TENSORS = 65_536
"""Tensors of one GGUF file (real ones: under 60,000, with each expert on its own)."""
GGUF_KEY_BYTES = 65_535
GGUF_STRING_BYTES = 64 << 20
GGUF_ARRAY_DEPTH = 4
"""Arrays inside arrays; readers elsewhere know one level."""
GGUF_NESTED_ARRAYS = 16_384
"""Arrays inside arrays are walked in Python: their number is bounded."""
GGUF_DIMENSIONS = 4
GGUF_NAME_BYTES = 63
"""llama.cpp keeps tensor names in 64 bytes, the last of them zero."""
GGUF_ALIGNMENT = (8, 1 << 20)
"""Least and largest alignment; powers of two."""
GGUF_SPLIT_FILES = 4_096
