"""Float folders written by Apple's mlx-lm: the tensors whose layout differs from transformers, mapped to GGUF tensors.

    mlp.switch_mlp.gate_proj.weight     [experts, out, in]: a layer's experts in one stack, as in GGUF;
                                        also `experts.gate_proj`, `switch_mlp.fc1`
    experts.switch_glu.gate_proj.weight the same in Gemma 4, where GGUF holds gate and up as one stack
    self_attn.embed_q, .unembed_out     DeepSeek's kv_b_proj, split as in GGUF
    feed_forward.gate_proj              w1 elsewhere; up_proj is w3, down_proj w2
    conv1d.weight                       [n, k, 1] instead of [n, 1, k]; mixtures with such layers store their norms
                                        without an offset of 1

Source: `sanitize` of the models of mlx-lm, which renames and stacks when loading a transformers folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from polyquant.architectures.hyper import Hyper
from polyquant.architectures.record import Architecture
from polyquant.errors import InputError
from polyquant.operations import SAME, AddConstant, Concat, Operation, Reshape, chain
from polyquant.types import TensorMap, Weight

__all__ = ["mlx_maps", "mlx_names"]

_PARTS = ("gate", "up", "down")
_NUMBERED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_LATENT = {"self_attn.embed_q": "attn_k_b", "self_attn.unembed_out": "attn_v_b"}
_TOGETHER = "ffn_gate_up_exps"


def mlx_names(names: Iterable[str], record: Architecture) -> dict[str, str]:
    """Return name -> GGUF name of the tensors with mlx-lm names; {} for a transformers folder."""
    stems = _stems(record)
    ends = tuple(f".{stem}.{suffix}" for stem in stems for suffix in ("weight", "bias"))
    out = {}
    for name in names if stems else ():
        if not name.endswith(ends) or (place := record.names.within(name)) is None:
            continue
        stem, _, suffix = place[1].rpartition(".")
        if stem in stems and suffix in ("weight", "bias"):
            out[name] = f"blk.{place[0]}.{stems[stem]}.{suffix}"
    return out


def mlx_maps(
    weights: Sequence[Weight], record: Architecture, hyper: Hyper, file: object
) -> Mapping[str, TensorMap | None]:
    """Return source -> the map of the GGUF tensor it becomes, None for additional sources; {} for a transformers
    folder.

    Raises InputError if a stack's number of experts differs from the configuration, or its gate or up half is missing.
    """
    mlx = mlx_names((w.name for w in weights), record)
    by_name = {w.name: w for w in weights}
    out: dict[str, TensorMap | None] = {}
    halves: dict[str, dict[str, Weight]] = {}
    fused = _TOGETHER in _known(record)
    for name, target in mlx.items():
        weight = by_name[name]
        if "_exps." in target:
            _check_count(weight, hyper, file)
        part = next((p for p in ("gate", "up") if fused and f"_{p}_exps." in target), None)
        if part is not None:
            halves.setdefault(target.replace(f"ffn_{part}_exps", _TOGETHER), {})[part] = weight
            continue
        out[name] = _map(target, (weight,), SAME)
    for target, parts in halves.items():
        if len(parts) < 2:
            (present,) = parts.values()
            raise InputError(
                "the experts' gate and up form one tensor, and the other half is missing",
                file=file,
                tensor=present.name,
            )
        out |= {w.name: None for w in parts.values()}
        out[parts["gate"].name] = _map(target, (parts["gate"], parts["up"]), Concat(1))
    return out | _of_convolutions(weights, record, hyper)


def _of_convolutions(weights: Sequence[Weight], record: Architecture, hyper: Hyper) -> dict[str, TensorMap | None]:
    """Map kernels with exchanged axes, and the norms of the same models, stored without an offset; {} without such
    kernels."""
    kernels = [w for w in weights if len(w.shape) == 3 and w.shape[2] == 1 < w.shape[1]] if record.has_experts else []
    targets = {w.name: target for w in kernels if (target := record.names.to_gguf(w.name)) is not None}
    if not targets:
        return {}
    out: dict[str, TensorMap | None] = {}
    for weight in weights:
        target = record.names.to_gguf(weight.name)
        change = record.change(target) if target is not None else None
        if target is None or change is None:
            continue
        if weight.name in targets:
            n, k, _ = weight.shape
            out[weight.name] = _map(target, (weight,), chain(Reshape((n, 1, k)), change.operation(hyper, (n, 1, k))))
        elif len(weight.shape) == 1 and isinstance(change.operation(hyper, weight.shape), AddConstant):
            out[weight.name] = _map(target, (weight,), SAME)
    return out


def _map(target: str, sources: Sequence[Weight], op: Operation) -> TensorMap:
    shapes = [w.shape for w in sources]
    return TensorMap(target, tuple(w.name for w in sources), op.shape(shapes, sources[0].name), op)


def _check_count(weight: Weight, hyper: Hyper, file: object) -> None:
    count = hyper.count("experts")
    if not weight.shape or weight.shape[0] != count:
        raise InputError(
            "the number of experts differs from the configuration",
            file=file, tensor=weight.name, expected=count, found=list(weight.shape),
        )  # fmt: skip


def _known(record: Architecture) -> frozenset[str]:
    """Return the GGUF stems of a layer."""
    exact = [*record.names.exact.values(), *(target for move in record.moves for target in move.targets)]
    return frozenset(record.names.layer.values()) | {name.rpartition(".")[0] for name in exact}


def _stems(record: Architecture) -> dict[str, str]:
    """Return mlx-lm stem -> GGUF stem, of mixtures only, for the stems that differ from transformers."""
    if not record.has_experts:
        return {}
    names, known = record.names.layer, _known(record)
    block = next((hf.partition(".")[0] for hf, gguf in names.items() if gguf == "ffn_gate_inp"), "")
    mlx = dict(_LATENT)
    for part in _PARTS:
        for stack in (f"{block}.switch_mlp", f"{block}.experts", "experts.switch_glu"):
            mlx[f"{stack}.{part}_proj"] = f"ffn_{part}_exps"
    mlx |= {f"{block}.switch_mlp.fc1": "ffn_up_exps", f"{block}.switch_mlp.fc2": "ffn_down_exps"}
    for hf, gguf in names.items():
        path, _, last = hf.rpartition(".")
        if last in _NUMBERED:
            mlx[f"{path}.{_NUMBERED[last]}"] = gguf
    split = {"ffn_gate_exps", "ffn_up_exps"} if _TOGETHER in known else set[str]()
    return {stem: gguf for stem, gguf in mlx.items() if stem not in names and gguf in known | split}
