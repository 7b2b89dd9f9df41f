"""Tensor parallelism: whether the layers of a model divide among N devices."""

from __future__ import annotations

from collections.abc import Iterator

from polyquant.analysis.consumers.model import FUSED, Model, integer

__all__ = ["blocks", "fused_rows", "indivisible"]

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")


def indivisible(model: Model, devices: int) -> Iterator[tuple[str, str | None]]:
    """Heads and layers that do not divide among the devices: (message, tensor). Nothing for one device."""
    if devices == 1:
        return
    heads, cached = model.number("num_attention_heads"), model.number("num_key_value_heads")
    if heads is not None and heads % devices:
        yield f"{heads} attention heads do not divide among {devices} devices", None
    if cached and cached % devices and devices % cached:
        yield f"{cached} key-value heads neither divide among {devices} devices nor repeat on them", None
    block = blocks(model)
    for name, parts in model.quantized():
        last, size = name.rpartition(".")[2], model.size(name)
        if size is None:
            continue
        rows, columns = size
        if last in _BY_COLUMNS:
            unit = block[1] if block else _group(model, name, columns)
            if columns % (devices * unit):
                yield f"{columns} columns do not divide into {devices} shares of whole groups of {unit}", name
        if last in _BY_ROWS and last not in ("k_proj", "v_proj"):
            unit = block[0] if block else 8 if model.method == "awq" and "qweight" in parts else 1
            if rows % (devices * unit):
                yield f"{rows} rows do not divide into {devices} shares of multiples of {unit}", name


def _group(model: Model, name: str, columns: int) -> int:
    """Columns of a group; 1 if there is one scale per row or matrix."""
    parts = model.layers[name]
    count = 1
    if "scales" in parts and len(parts["scales"].shape) == 2:
        count = parts["scales"].shape[0 if "qweight" in parts else 1]
    elif "weight_scale" in parts and len(parts["weight_scale"].shape) == 2:
        count = parts["weight_scale"].shape[1]
    return max(1, columns // count) if count > 1 else 1


def blocks(model: Model) -> tuple[int, int] | None:
    """Rows and columns of the blocks of block-quantized FP8 weights; None for other weights."""
    settings = model.settings or {}
    size = settings.get("weight_block_size")
    listed = settings.get("config_groups")
    for group in listed.values() if isinstance(listed, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        size = size or (weights.get("block_structure") if isinstance(weights, dict) else None)
    if isinstance(size, list) and len(size) == 2 and all(isinstance(s, int) and s > 0 for s in size):
        return size[0], size[1]
    algorithm = settings.get("quant_algo")
    if isinstance(algorithm, str) and algorithm.upper() in ("FP8_PB_WO", "FP8_BLOCK_SCALES"):
        return (integer(settings, "group_size") or 128,) * 2
    return None


def fused_rows(model: Model, block: int, *, last: bool) -> Iterator[tuple[str, int]]:
    """Parts of joined layers whose rows are not a multiple of the block: (module, rows).

    last: whether that of the last part matters too.
    """
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in model.layers):
        for group in FUSED:
            names = [f"{parent}.{part}" for part in group]
            if not all(n in model.layers and "weight" in model.layers[n] for n in names):
                continue
            if model.layers[names[0]]["weight"].dtype != "F8_E4M3":
                continue
            for name in names if last else names[:-1]:
                size = model.size(name)
                if size is not None and size[0] % block:
                    yield name, size[0]
