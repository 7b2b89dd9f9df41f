"""Substitute for the base classes of quantization methods."""

from abc import ABC, abstractmethod


class QuantizeMethodBase(ABC):
    @abstractmethod
    def create_weights(self, layer, *weight_args, **extra_weight_attrs): ...

    @abstractmethod
    def apply(self, layer, *args, **kwargs): ...

    def process_weights_after_loading(self, layer):
        return

    def dequantize_weight(self, layer):
        raise NotImplementedError


class QuantizationConfig(ABC):
    def __init__(self):
        super().__init__()
        self.packed_modules_mapping = {}

    @abstractmethod
    def get_name(self): ...

    @abstractmethod
    def get_supported_act_dtypes(self): ...

    @classmethod
    @abstractmethod
    def get_min_capability(cls): ...

    @staticmethod
    @abstractmethod
    def get_config_filenames(): ...

    @classmethod
    @abstractmethod
    def from_config(cls, config): ...

    @abstractmethod
    def get_quant_method(self, layer, prefix): ...

    def apply_vllm_mapper(self, hf_to_vllm_mapper):
        return

    def maybe_update_config(self, model_name, hf_config=None, revision=None):
        return
