"""Trellis layers in vLLM: its real classes if vLLM imports (0.33 does), otherwise a substitute with their signatures.

Needs torch: `make check-slow`. No model runs here: vLLM's attention needs its compiled kernels.
"""

from __future__ import annotations

import pickle
import socket
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import polyquant as pq
from polyquant.errors import InputError, UnsupportedError

LLAMA = Path(__file__).parents[1] / "vectors" / "models" / "tiny-llama-untied" / "hf"
ATTENTION = "model.layers.0.self_attn"
MEMBERS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: pip install torch"),
]


def test_the_entry_point():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["polyquant"].partition(":")
    assert callable(getattr(import_module(module), function))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vllm") / "v3"
    pq.quantize(LLAMA, path, to="trellis-v3", bits=3, effort="fast", rules=["*.1.mlp.up_proj*=bf16"])
    return path


def one_process():
    """Give the real vLLM a group of one process, which its layers ask for."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, address, 0, "gloo")
        initialize_model_parallel(1, 1)


@pytest.fixture(scope="module")
def vllm():
    """vLLM's module of linear layers, with our plugin registered."""
    if find_spec("vllm") is None:
        sys.path.insert(0, str(Path(__file__).parent / "vllm_interface"))
    elif find_spec("vllm.distributed") is not None:
        one_process()
    linear = import_module("vllm.model_executor.layers.linear")
    import_module("polyquant.integrations.vllm").register()
    import_module("polyquant.integrations.vllm").register()
    return linear


@pytest.fixture
def config(vllm, folder):
    quantization = import_module("vllm.model_executor.layers.quantization")
    made = quantization.get_quantization_config("polyquant_trellis").from_config({"quant_method": "polyquant_trellis"})
    made.maybe_update_config(str(folder), hf_config=None)
    made.packed_modules_mapping = MEMBERS
    return made


def loaded(layer, prefix, folder, members):
    """Load a layer as vLLM's models do: by the parameter's loader, with a shard for each member of a fused layer."""
    import torch
    from safetensors.torch import load_file

    tensors = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    parameters = dict(layer.named_parameters())
    assert parameters
    stem = prefix.rpartition(".")[0]
    for member, shard in members.items():
        for name, tensor in tensors.items():
            if name.startswith(f"{stem}.{member}."):
                parameter = parameters[name.removeprefix(f"{stem}.{member}.")]
                arguments = (parameter, tensor) if shard is None else (parameter, tensor, shard)
                parameter.weight_loader(*arguments)
    layer.quant_method.process_weights_after_loading(layer)
    assert isinstance(next(layer.parameters()), torch.nn.Parameter)
    return layer


def floats(folder, *names):
    opened = pq.open(folder)
    return np.concatenate([opened[f"{name}.weight"].dequantize() for name in names])


def qkv(vllm, config, prefix=f"{ATTENTION}.qkv_proj"):
    import torch

    return vllm.QKVParallelLinear(
        256, 64, 4, 2, bias=False, params_dtype=torch.float32, quant_config=config, prefix=prefix, disable_tp=True
    )


def output(layer, x):
    found = layer(x)
    return (found[0] if isinstance(found, tuple) else found).numpy()


# ---------------------------------------------------------------- layers


def test_a_fused_layer_multiplies_its_packed_matrices(vllm, config, folder):
    import torch

    prefix = f"{ATTENTION}.qkv_proj"
    layer = loaded(qkv(vllm, config), prefix, folder, {"q_proj": "q", "k_proj": "k", "v_proj": "v"})
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 256), np.float32))
    weight = floats(folder, *(f"{ATTENTION}.{m}" for m in MEMBERS["qkv_proj"]))
    np.testing.assert_allclose(output(layer, x), x.numpy() @ weight.T, atol=2e-4)
    np.testing.assert_array_equal(layer.quant_method.dequantize_weight(layer).numpy(), weight)
    assert sum(p.numel() for p in layer.parameters()) == 0  # no second copy
    layer.quant_method.process_weights_after_loading(layer)  # vLLM may call it again
    assert output(layer, x[:0]).shape == (0, 512)


def test_the_kernel_is_an_operator_that_compiles(vllm, config, folder):
    import torch

    layer = loaded(qkv(vllm, config), f"{ATTENTION}.qkv_proj", folder, {"q_proj": "q", "k_proj": "k", "v_proj": "v"})
    x = torch.ones(3, 256)
    graph = torch.compile(lambda x: layer.quant_method.apply(layer, x) * 2, backend="aot_eager", fullgraph=True)
    np.testing.assert_allclose(graph(x).numpy(), 2 * output(layer, x), rtol=1e-6)
    torch.library.opcheck(torch.ops.polyquant.trellis_linear, (x, layer.polyquant_number, layer.weight.outputs))


def test_a_single_layer_with_a_bias_in_half_precision(vllm, config, folder):
    import torch

    prefix = "model.layers.1.mlp.down_proj"
    layer = vllm.ReplicatedLinear(
        256, 256, bias=True, params_dtype=torch.bfloat16, quant_config=config, prefix=prefix, disable_tp=True
    )
    layer.bias.data.fill_(2.0)
    loaded(layer, prefix, folder, {"down_proj": None})
    x = torch.ones(2, 256, dtype=torch.bfloat16)
    got = layer(x)
    got = got[0] if isinstance(got, tuple) else got
    want = np.ones((2, 256)) @ floats(folder, prefix).T + 2
    assert got.dtype == torch.bfloat16
    np.testing.assert_allclose(got.float().numpy(), want, rtol=0.02, atol=0.02)


def test_on_another_device_the_weights_are_dequantized(vllm, config, folder):
    """The path of a GPU, on the meta device, which has no values."""
    import torch

    with torch.device("meta"):
        layer = qkv(vllm, config)
    loaded(layer, f"{ATTENTION}.qkv_proj", folder, {"q_proj": "q", "k_proj": "k", "v_proj": "v"})
    assert layer.weight.shape == (512, 256) and layer.weight.device.type == "meta"
    assert layer.quant_method.apply(layer, torch.ones(2, 256, device="meta")).shape == (2, 512)


def test_float_layers_stay_vllms(vllm, config):
    import torch

    layer = vllm.ReplicatedLinear(
        256, 256, bias=False, params_dtype=torch.float32, quant_config=config, prefix="model.layers.0.other",
        disable_tp=True,
    )  # fmt: skip
    assert type(layer.quant_method) is vllm.UnquantizedLinearMethod
    assert config.get_quant_method(torch.nn.Embedding(2, 2), "model.embed_tokens") is None


def test_the_configuration_travels_between_processes(config, folder):
    again = pickle.loads(pickle.dumps(config))
    assert again.codecs.keys() == config.codecs.keys() and again.get_name() == "polyquant_trellis"
    assert again.codecs[f"{ATTENTION}.q_proj.weight"].name == config.codecs[f"{ATTENTION}.q_proj.weight"].name


# ---------------------------------------------------------------- refused


def test_a_fused_layer_must_be_quantized_as_a_whole(vllm, config):
    layer = vllm.ReplicatedLinear(2, 2, bias=False, prefix="x", disable_tp=True)
    with pytest.raises(UnsupportedError, match=r"vLLM fuses gate_proj, up_proj: quantize all of them or none"):
        config.get_quant_method(layer, "model.layers.1.mlp.gate_up_proj")


def test_other_modules_with_quantized_weights_are_refused(config):
    import torch

    with pytest.raises(UnsupportedError, match="only linear layers can have Trellis weights in vLLM"):
        config.get_quant_method(torch.nn.ModuleList(), "model.layers.0.mlp")


def test_tensor_parallelism_is_refused(vllm, config):
    import torch

    layer = torch.nn.Module()
    method = config.get_quant_method(
        vllm.ReplicatedLinear(2, 2, bias=False, prefix="x", disable_tp=True), f"{ATTENTION}.qkv_proj"
    )
    with pytest.raises(UnsupportedError, match=r"cannot be split over devices.*tensor_parallel_size"):
        method.create_weights(layer, 256, [128, 64, 64], 256, 512, torch.float32)


@pytest.mark.parametrize(("change", "message"), [("missing", "a component is missing"), ("shape", r"found \[7\]")])
def test_components_are_checked(vllm, config, change, message):
    import torch

    layer = qkv(vllm, config)
    parameters = dict(layer.named_parameters())
    with pytest.raises(InputError, match=message):
        if change == "shape":
            parameters["weight.su"].weight_loader(parameters["weight.su"], torch.ones(7), "q")
        layer.quant_method.process_weights_after_loading(layer)


def test_folders_without_trellis_v3_are_refused(vllm, config):
    again = type(config).from_config({})
    with pytest.raises(UnsupportedError, match="vLLM loads Trellis v3 as polyquant writes it"):
        again.maybe_update_config(str(LLAMA))
    with pytest.raises(InputError, match="require a local folder"):
        again.maybe_update_config("someone/model")
