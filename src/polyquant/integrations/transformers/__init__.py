"""Packed Trellis weights in Hugging Face transformers: `import polyquant.hf` registers the plugin, then
`from_pretrained` works.

transformers randomly initializes missing tensors and only logs it. Here that is an error before anything is loaded.
"""

from polyquant.errors import UnsupportedError

OLDEST = (5, 23)
"""The oldest supported transformers; earlier releases load weights differently."""

try:
    import torch as _torch  # noqa: F401 - imported here, so the error below names what is missing
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
