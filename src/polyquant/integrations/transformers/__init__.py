"""Trellis weights in Hugging Face transformers, packed as they lie in the file: `import polyquant.hf` registers, then `from_pretrained` works.

transformers fills what it does not find with random numbers and writes a line to its log. Here that is an error before anything is loaded.
"""

from polyquant.errors import UnsupportedError

OLDEST = (5, 23)
"""Of transformers: earlier releases load weights another way."""

try:
    import torch as _torch  # noqa: F401 - asked for here, so that the one line below says what is missing
    from transformers import __version__ as _version
except ImportError as absent:
    raise UnsupportedError(
        f"transformers cannot be used: {absent}", hint="pip install 'polyquant[transformers]'"
    ) from absent
if tuple(int(n) for n in _version.split(".")[:2]) < OLDEST:
    raise UnsupportedError(
        "this transformers is too old",
        expected="{}.{} or later".format(*OLDEST),
        found=_version,
        hint="pip install 'polyquant[transformers]'",
    )
