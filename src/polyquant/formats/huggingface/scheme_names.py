"""Names of the quantization schemes in which folders are written, and the codec of each for floats.

Apart from the schemes themselves, since `--help` lists the names without importing any codec.
"""

from __future__ import annotations

__all__ = ["DEFAULTS", "MODULES"]

MODULES: dict[str, str] = {
    "compressed-tensors": "compressed", "gptq": "gptq", "awq": "awq", "fp8": "fp8", "modelopt": "modelopt",
    "mxfp4": "mxfp4", "mlx": "mlx",
}  # fmt: skip
"""Name, for --to, -> the module of this package whose SCHEME writes it."""
DEFAULTS: dict[str, str] = {
    "compressed-tensors": "compressed.p4.g128", "gptq": "gptq.4.g128.sym", "awq": "awq.4.g128",
    "fp8": "fp8.e4m3.b128.inv.f32", "modelopt": "hf_nvfp4", "mxfp4": "hf_mxfp4", "mlx": "mlx.4.g64",
}  # fmt: skip
"""Name -> the codec for floats, unless the user names one."""
