"""Substitute for the linear layers, on one device."""

import torch

from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase


class LinearMethodBase(QuantizeMethodBase):
    pass


class UnquantizedLinearMethod(LinearMethodBase):
    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype, **attrs
    ):
        layer.weight = torch.nn.Parameter(torch.zeros(output_size, input_size, dtype=params_dtype))

    def apply(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight, bias)


class LinearBase(torch.nn.Module):
    def __init__(self, input_size, sizes, bias, params_dtype, quant_config, prefix):
        super().__init__()
        dtype, output_size = params_dtype or torch.get_default_dtype(), sum(sizes)
        self.quant_method = UnquantizedLinearMethod()
        if quant_config is not None:
            self.quant_method = quant_config.get_quant_method(self, prefix)
        self.quant_method.create_weights(
            self, input_size, sizes, input_size, output_size, dtype, weight_loader=self.weight_loader
        )
        self.bias = torch.nn.Parameter(torch.zeros(output_size, dtype=dtype), requires_grad=False) if bias else None

    def weight_loader(self, param, loaded_weight, shard_id=None):
        param.data.copy_(loaded_weight)

    def forward(self, x):
        return self.quant_method.apply(self, x, self.bias), None


class ReplicatedLinear(LinearBase):
    def __init__(
        self, input_size, output_size, bias=True, skip_bias_add=False, params_dtype=None, quant_config=None, prefix="",
        *, return_bias=True, disable_tp=False,
    ):  # fmt: skip
        super().__init__(input_size, [output_size], bias, params_dtype, quant_config, prefix)


class QKVParallelLinear(LinearBase):
    def __init__(
        self, hidden_size, head_size, total_num_heads, total_num_kv_heads=None, bias=True, skip_bias_add=False,
        params_dtype=None, quant_config=None, prefix="", *, return_bias=True, disable_tp=False,
    ):  # fmt: skip
        kv = total_num_kv_heads or total_num_heads
        sizes = [heads * head_size for heads in (total_num_heads, kv, kv)]
        super().__init__(hidden_size, sizes, bias, params_dtype, quant_config, prefix)
