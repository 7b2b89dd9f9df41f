"""Substitute for the registry of quantization methods."""

from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

_CUSTOMIZED = {}


def register_quantization_config(quantization):
    def wrapper(kind):
        if not issubclass(kind, QuantizationConfig):
            raise ValueError("The quantization config must be a subclass of `QuantizationConfig`.")
        _CUSTOMIZED[quantization] = kind
        return kind

    return wrapper


def get_quantization_config(quantization):
    return _CUSTOMIZED[quantization]
