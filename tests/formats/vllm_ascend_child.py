"""Run vllm-ascend's own parser of quant_model_description.json and its parameter tables on folders, without an NPU.

    python vllm_ascend_child.py CHECKOUT FOLDER...

Prints JSON: folder -> layer -> problems ("" for a layer that it loads; "FLOAT" for one that it leaves in floats). Only
`vllm_ascend.quantization` is real; vLLM, torch_npu and the rest of the package are empty placeholders.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch
from safetensors import safe_open

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class Anything:
    """An object with every attribute, which is called, subclassed and used as a decorator."""

    def __init__(self, *_, **__):
        pass

    def __class_getitem__(cls, _):
        return cls

    def __getattr__(self, name):
        return Anything()

    def __call__(self, *arguments, **_):
        return arguments[0] if len(arguments) == 1 and isinstance(arguments[0], type) else Anything()

    def __or__(self, _):
        return self

    __ror__ = __or__


class Placeholder(ModuleType):
    """A module whose names are classes, or functions that decorate."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name if name.isupper() else type(name, (Anything,), {}) if name[0].isupper() else Anything()


class Finder(MetaPathFinder, Loader):
    """placeholders for everything that the parser imports, except itself."""

    def find_spec(self, name, path, target=None):
        top, inside = name.partition(".")[0], name.startswith("vllm_ascend.quantization")
        return (
            ModuleSpec(name, self, is_package=True)
            if top in ("vllm", "vllm_ascend", "torch_npu") and not inside
            else None
        )

    def create_module(self, spec):
        return Placeholder(spec.name)

    def exec_module(self, module):
        module.__path__ = []


def real(checkout):
    """Import the real package below the placeholder vllm_ascend."""
    sys.meta_path.insert(0, Finder())
    import_module("vllm_ascend").__path__ = [str(checkout / "vllm_ascend")]
    return import_module("vllm_ascend.quantization.modelslim_config"), import_module("vllm_ascend.quantization.methods")


def layers(weights):
    """vLLM's layers: fused names for q, k, v and gate, up; one for all experts of a layer."""
    found = {}
    for name in weights:
        stem = name.removesuffix(".weight")
        parent, _, leaf = stem.rpartition(".")
        fused = next((f for f, members in FUSED.items() if leaf in members), None)
        if ".experts." in stem:
            found.setdefault(stem.partition(".experts.")[0] + ".experts", []).append(stem)
        else:
            found.setdefault(f"{parent}.{fused}" if fused else stem, []).append(stem)
    return found


def check(parser, methods, folder):
    description = json.loads((folder / "quant_model_description.json").read_text())
    config = parser.AscendModelSlimConfig(description)
    config._apply_extra_quant_adaptations()
    stored = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            stored |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    linears = [n for n in stored if n.endswith(".weight") and len(stored[n].get_shape()) == 2]
    dtype = getattr(torch, json.loads((folder / "config.json").read_text())["torch_dtype"])
    out = {}
    for prefix, members in layers(linears).items():
        experts = prefix.endswith(".experts")
        mapping = {**FUSED, "experts": [f"experts.0.{p}_proj" for p in ("gate", "up", "down")]} if experts else FUSED
        try:
            if config.is_layer_skipped_ascend(prefix, mapping):
                out[prefix] = "FLOAT"
                continue
            kind = parser.get_quant_type_for_layer(config.quant_description, prefix, "linear", mapping)
            scheme = methods.get_scheme_class(kind, "moe" if experts else "linear")
            out[prefix] = f"no scheme for {kind}" if scheme is None else ""
            if scheme is not None and not experts:
                out[prefix] = ", ".join(p for m in members for p in misfits(scheme, stored, m, dtype))
        except (KeyError, ValueError, AssertionError) as problem:
            out[prefix] = f"{type(problem).__name__}: {problem}"
    return out


def misfits(scheme, stored, member, dtype):
    """Parameters of the scheme that the folder lacks or stores in a different shape, and additional ones."""
    instance = scheme.__new__(scheme)
    if hasattr(scheme, "get_pertensor_param") and "PDMix" in scheme.__name__:
        static = import_module("vllm_ascend.quantization.methods.w8a8_static")
        instance._static_method = static.AscendW8A8LinearMethod()
    n, k = stored[f"{member}.weight"].get_shape()
    wanted = {
        **instance.get_weight(k, n, dtype),
        **instance.get_pertensor_param(dtype),
        **instance.get_perchannel_param(n, dtype),
    }
    for part, tensor in wanted.items():
        found = stored.get(f"{member}.{part}")
        if found is None:
            unused = part in ("weight_scale", "weight_offset") and f"{member}.deq_scale" in stored
            yield from () if unused else (f"{member}.{part} is missing",)
        elif list(tensor.shape) != list(found.get_shape()):
            yield f"{member}.{part} {list(found.get_shape())} is loaded as {list(tensor.shape)}"
        elif part == "deq_scale" and str(tensor.dtype) != f"torch.{DTYPES[found.get_dtype()]}":
            yield f"{member}.{part} {found.get_dtype()} is loaded as {tensor.dtype}"
    extra = [n for n in stored if n.startswith(f"{member}.") and n.removeprefix(f"{member}.") not in (*wanted, "bias")]
    yield from (f"{name} has no parameter" for name in extra if "kv_cache" not in name)


DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I8": "int8"}


if __name__ == "__main__":
    modules = real(Path(sys.argv[1]))
    print(json.dumps({folder: check(*modules, Path(folder)) for folder in sys.argv[2:]}))
