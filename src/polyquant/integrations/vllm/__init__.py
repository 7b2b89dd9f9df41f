"""Trellis v3 folders in vLLM: linear layers with packed weights on the CPU, dequantized weights on other devices.

vLLM calls `register` through our entry point in its group `vllm.general_plugins`, in every process that it starts.
"""

from __future__ import annotations

from importlib import import_module

__all__ = ["register"]


def register() -> None:
    """Register the quantization method of Trellis folders. May be called repeatedly."""
    import_module("polyquant.integrations.vllm.config")
