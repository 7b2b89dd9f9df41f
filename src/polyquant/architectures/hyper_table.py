"""The table of hyper-parameters: one row for each, with its key in config.json, its key in GGUF, its type and default.

| name | config.json | GGUF `{architecture}.` | GGUF aliases |
|---|---|---|---|
| layers | num_hidden_layers | block_count | n_layers, num_hidden_layers |
| context | max_position_embeddings | context_length | max_position_embeddings |
| hidden | hidden_size | embedding_length | n_embd, hidden_size |
| feed_forward | intermediate_size | feed_forward_length | intermediate_size |
| heads | num_attention_heads | attention.head_count | n_heads, num_attention_heads |
| kv_heads | num_key_value_heads | attention.head_count_kv | n_kv_heads, num_key_value_heads |
| rope_theta | rope_theta, or inside rope_parameters | rope.freq_base | rope_theta |
| norm_eps | rms_norm_eps | attention.layer_norm_rms_epsilon | rms_norm_eps |
| head_dim | head_dim | attention.key_length | head_dim |
| vocab | vocab_size | vocab_size, or rows of the embedding | vocab_size |
| rotated | partial_rotary_factor, a share | rope.dimension_count, a count | |
| activation | hidden_act | implied by the architecture | |

Rows are written in this order, as by llama.cpp's converter. An architecture with other keys derives its table from
USUAL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

from polyquant.architectures import rope
from polyquant.architectures.hyper import (
    MAX_CONTEXT,
    MAX_LAYERS,
    MAX_SIZE,
    Hyper,
    Value,
    bounded_integer,
    real_number,
    signed_number,
)
from polyquant.architectures.windows import Windows, no_windows
from polyquant.errors import InputError, UnsupportedError
from polyquant.gguf_values import boolean, f32, f32s, flags, i32s, string, u32
from polyquant.types import Meta

__all__ = ["USUAL", "HyperTable", "Key"]

Writing: TypeAlias = Literal["always", "where set", "unless default", "never"]
ValueKind: TypeAlias = Literal["count", "real", "flag", "text", "counts", "reals", "flags"]
"""Scalars, then lists with an entry per layer."""

_METAS: dict[ValueKind, Callable[[Any], Meta]] = {
    "count": u32, "real": f32, "flag": lambda v: boolean(bool(v)), "text": string, "counts": i32s, "reals": f32s,
    "flags": lambda v: flags([bool(x) for x in v]),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Key:
    """One hyper-parameter: a field of Hyper, or an entry of Hyper.more.

    config: keys of config.json; the first one present is read, all are written; () if there is none.
    read, entries: functions used instead, from config.json to the value and from the value to entries of config.json.
    gguf: the key after the architecture's name, None if GGUF has none. also: further keys that get the same value.
    aliases: names used by other writers. read_gguf: a function of the lookup, used instead of these.
    default: used where the file is silent: a value, the name of another row, or None if the file must specify it.
    kind: of value. each_layer: a list must have an entry for every layer. high, low: bounds of a count.
    unit: the factor from config.json's unit to ours.
    write: whether GGUF gets it; "where set": unless it is 0 or empty; "unless default": unless it equals the default
    that readers of GGUF assume.
    """

    name: str
    config: tuple[str, ...]
    gguf: str | None = None
    also: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    default: Value | None = None
    high: int = MAX_SIZE
    low: int = 1
    kind: ValueKind = "count"
    unit: float = 1.0
    write: Writing = "always"
    read: Callable[[Mapping[str, Any]], Any] | None = None
    entries: Callable[[Any], Mapping[str, Any]] | None = None
    read_gguf: Callable[[Callable[..., Any]], Any] | None = None
    each_layer: bool = False

    @property
    def real(self) -> bool:
        """True for a float."""
        return self.kind == "real"

    def written(self, value: Any) -> bool:
        """True if this value is written to GGUF."""
        if self.gguf is None or self.write == "never":
            return False
        return self.write == "always" or bool(value if self.write == "where set" else value != self.default)

    def of_config(self, config: Mapping[str, Any]) -> Any:
        """Return the raw value of a config.json, None if absent."""
        if self.read is not None:
            return self.read(config)
        return next((config[k] for k in self.config if config.get(k) is not None), None)

    def shown(self, value: Any) -> Any:
        """Return the value as config.json stores it."""
        return bool(value) if self.kind == "flag" else list(value) if self.kind in _LISTS else value

    def meta(self, value: Any) -> Meta:
        """Return the value as GGUF stores it."""
        if self.kind == "real" and self.name == "rotated":
            return u32(value)
        return _METAS[self.kind](value)

    def checked(self, value: Any, what: str, file: object) -> Value:
        """Return the value, checked for this kind. Raises InputError."""
        if self.kind == "real":
            return real_number(value, what, file=file)
        if self.kind == "flag":
            if not isinstance(value, bool | int) or value not in (0, 1):
                raise InputError(f"{what} is not a boolean", file=file, expected="true or false", found=value)
            return int(value)
        if self.kind == "text":
            if not isinstance(value, str):
                raise InputError(f"{what} is not a string", file=file, found=value)
            return value
        if self.kind in ("counts", "flags", "reals"):
            return self._list(value, what, file)
        return bounded_integer(value, what, self.high, file=file, low=self.low)

    def _list(self, value: Any, what: str, file: object) -> tuple[int, ...] | tuple[float, ...]:
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            raise InputError(f"{what} is not a list", file=file, expected="one value per layer", found=value)
        if self.kind == "reals":
            return tuple(signed_number(v, what, file=file) for v in value)
        high = 1 if self.kind == "flags" else self.high
        return tuple(bounded_integer(int(v) if isinstance(v, bool) else v, what, high, file=file, low=0) for v in value)


_ROWS = (
    Key("layers", ("num_hidden_layers",), "block_count", aliases=("n_layers", "num_hidden_layers"), high=MAX_LAYERS),
    Key("context", ("max_position_embeddings",), "context_length", aliases=("max_position_embeddings",), default=2048,
        high=MAX_CONTEXT),
    Key("hidden", ("hidden_size",), "embedding_length", aliases=("n_embd", "hidden_size")),
    Key("feed_forward", ("intermediate_size",), "feed_forward_length", aliases=("intermediate_size",)),
    Key("heads", ("num_attention_heads",), "attention.head_count", aliases=("n_heads", "num_attention_heads")),
    Key("kv_heads", ("num_key_value_heads",), "attention.head_count_kv", aliases=("n_kv_heads", "num_key_value_heads"),
        default="heads"),
    Key("rope_theta", ("rope_theta",), "rope.freq_base", aliases=("rope_theta",), default=10000.0, kind="real"),
    Key("norm_eps", ("rms_norm_eps",), "attention.layer_norm_rms_epsilon", aliases=("rms_norm_eps",), default=1e-6,
        kind="real"),
    Key("head_dim", ("head_dim",), "attention.key_length", ("attention.value_length",), ("head_dim",), default=0, low=0,
        write="where set"),
    Key("vocab", ("vocab_size",), "vocab_size", aliases=("vocab_size",), write="never"),
    Key("rotated", ("partial_rotary_factor",), "rope.dimension_count", default=1.0, kind="real", write="where set"),
    Key("activation", ("hidden_act",), default="silu", kind="text"),
)  # fmt: skip

_LISTS = ("counts", "reals", "flags")
_FIELDS = frozenset(f.name for f in fields(Hyper))
_SILENT = {"rope_theta": 10000.0, "rotated": 1.0}
"""The defaults of llama.cpp, in every architecture, for keys missing from a GGUF file."""


@dataclass(frozen=True, slots=True)
class HyperTable:
    """The rows of an architecture, and the other entries of its headers.

    always: entries of config.json required by this architecture (another value means another architecture); also
    written.
    written: entries that are only written. metadata: GGUF keys that it always has.
    tied: whether embeddings are tied where config.json does not specify it.
    windows: reads sliding windows from a config.json. gguf_windows: the windows that readers of GGUF assume.
    yarn: entries of a YaRN scaling that are fixed for this architecture and absent from GGUF.
    yarn_log: factor from mscale_all_dim to rope.scaling.yarn_log_multiplier, 0 if GGUF lacks that key.
    more_metadata, more_config: computed GGUF keys and config.json entries.
    gguf_warning: a sentence about what GGUF cannot express for a model, or None.
    scaling: Hyper.rope from (config.json, its RoPE parameters, its path).
    """

    keys: tuple[Key, ...] = _ROWS
    always: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Meta] = field(default_factory=dict)
    tied: bool | None = None
    windows: Windows = no_windows
    gguf_windows: Callable[[Hyper], tuple[int, ...]] | None = None
    yarn: Mapping[str, Any] = field(default_factory=dict)
    yarn_log: float = 0.0
    more_metadata: Callable[[Hyper], Mapping[str, Meta]] | None = None
    more_config: Callable[[Hyper], Mapping[str, Any]] | None = None
    gguf_warning: Callable[[Hyper], str | None] | None = None
    scaling: Callable[[Mapping[str, Any], Mapping[str, Any], object], dict[str, Any]] = rope.of_config

    def plus(self, *keys: Key) -> HyperTable:
        """Return this table with further rows."""
        return replace(self, keys=(*self.keys, *keys))

    def without(self, *rows: str) -> HyperTable:
        """Return this table without some rows."""
        return replace(self, keys=tuple(k for k in self.keys if k.name not in rows))

    def changed(self, **rows: Mapping[str, Any]) -> HyperTable:
        """Return this table with other values in some rows: `changed(rope_theta={"default": 500000.0})`."""
        return replace(self, keys=tuple(replace(k, **rows.get(k.name, {})) for k in self.keys))

    # ------------------------------------------------------------ reading

    def read_config(self, config: Mapping[str, Any], *, vocab: int = 0, file: object = None) -> Hyper:
        """Return the hyper-parameters of a config.json.

        vocab: rows of the embedding, used if the file has no vocab_size. Raises InputError; UnsupportedError for a
        variant that is another architecture.
        """
        for entry, needed in self.always.items():
            value = config.get(entry, needed)
            if value != needed or isinstance(value, bool) != isinstance(needed, bool):
                raise UnsupportedError(f"a model with {entry} = {value!r} is not supported", file=file, expected=needed)
        scaling = rope.parameters(config, file)
        values: dict[str, Any] = {}
        for key in self.keys:
            value = key.of_config(config)
            if value is None and key.config[:1] in (("rope_theta",), ("partial_rotary_factor",)):
                value = scaling.get(key.config[0])  # transformers 5 nests them in rope_parameters
            if value is not None and key.unit != 1:
                value = real_number(value, key.config[0], file=file) * key.unit
            values[key.name] = value
        if values["vocab"] is None:
            values["vocab"] = vocab
        head = config.get("tie_word_embeddings")
        tied = head if isinstance(head, bool) else self.tied
        hyper = self._checked(values, self.scaling(config, scaling, file), tied, file)
        return replace(hyper, windows=self.windows(config, hyper.layers, file))

    def read_metadata(
        self, metadata: Mapping[str, Any], architecture: str, *, vocab: int, tied: bool, file: object = None
    ) -> Hyper:
        """Return the hyper-parameters of a GGUF file. vocab: rows of the embedding. Raises InputError."""

        def get(key: str, *aliases: str, raw: bool = False) -> Any:
            for name in (key, *aliases):
                for full in (f"{architecture}.{name}", name):
                    if full in metadata:
                        return metadata[full] if raw else _one(metadata[full])
            return None

        def stored(key: Key) -> Any:
            if key.read_gguf is not None:
                return key.read_gguf(get)
            return None if key.gguf is None else get(key.gguf, *key.aliases, raw=key.kind in _LISTS)

        values = {k.name: stored(k) for k in self.keys}
        values |= {k.name: rope.shortest(values[k.name]) for k in self.keys if k.real and k.name in values}
        counted = values["rotated"] is not None
        values = {**values, "vocab": values["vocab"] or vocab}
        for name, value in _SILENT.items():
            values[name] = value if values[name] is None else values[name]
        hyper = self._checked(
            values, rope.of_metadata(get, known=self.yarn, log=self.yarn_log), tied, file, counted=counted
        )
        return replace(hyper, windows=self.gguf_windows(hyper)) if self.gguf_windows else hyper

    def _checked(
        self,
        raw: Mapping[str, Any],
        scaling: Mapping[str, Any],
        tied: bool | None,
        file: object,
        *,
        counted: bool = False,
    ) -> Hyper:
        """Return Hyper from raw values by field; None where the source is silent.

        counted: `rotated` is a count, not a fraction of a head.
        """
        values: dict[Any, Any] = {}
        leading = {key.default for key in self.keys}  # rows that other rows take their default from
        for key in sorted(self.keys, key=lambda key: key.name not in leading):
            value, what = raw.get(key.name), key.config[0] if key.config else key.name
            if value is None:
                value = values.get(key.default, key.default) if isinstance(key.default, str) else key.default
            if value is None:
                raise InputError("the configuration is incomplete", file=file, expected=what)
            values[key.name] = value if counted and key.name == "rotated" else key.checked(value, what, file)
        for key in self.keys:
            if key.each_layer and len(values[key.name]) != values["layers"]:
                raise InputError(
                    f"{key.gguf} does not have one entry per layer",
                    file=file,
                    expected=values["layers"],
                    found=len(values[key.name]),
                )
        heads, kv_heads, hidden = values["heads"], values["kv_heads"], values["hidden"]
        if kv_heads and heads % kv_heads:
            raise InputError(
                "key/value heads do not divide the heads", file=file, expected=f"a divisor of {heads}", found=kv_heads
            )
        if not values["head_dim"] and heads and hidden % heads:
            expected = f"a divisor of {hidden}"
            raise InputError("heads do not divide hidden_size", file=file, expected=expected, found=heads)
        if not values["rope_theta"]:
            raise InputError("rope_theta cannot be right", file=file, expected="a positive number", found=0.0)
        head = values["head_dim"] or hidden // max(heads, 1)
        rotated = rope.rotated(values["rotated"], head, file, counted=counted)
        values |= {"rotated": rotated if rotated != head else 0, "rope": scaling, "tied": tied}
        more = {name: values.pop(name) for name in list(values) if name not in _FIELDS}
        return Hyper(**values, more=more)

    # ------------------------------------------------------------ writing

    def to_config(self, hyper: Hyper) -> dict[str, Any]:
        """Return the config.json entries of the hyper-parameters, in both spellings of transformers."""
        out: dict[str, Any] = {}
        for key in self.keys:
            value = hyper.head_size if key.name == "head_dim" else hyper.value(key.name)
            if key.unit != 1:
                value = value / key.unit
                value = int(value) if value == int(value) else value
            if key.entries is not None:
                out |= key.entries(value)
            elif key.name != "rotated":
                out |= dict.fromkeys(key.config, key.shown(value))
            elif hyper.rotated or key.default != 1.0:
                out |= dict.fromkeys(key.config, rope.share(hyper.rotary_size, hyper.head_size))
        if "rope_theta" in out:
            part = {k: out[k] for k in ("partial_rotary_factor",) if k in out}
            part |= out.get("rope_parameters", {})  # entries from rows belong here too
            out["rope_parameters"] = {"rope_type": "default", "rope_theta": hyper.rope_theta, **part, **hyper.rope}
            out |= {"rope_scaling": dict(hyper.rope)} if hyper.rope else {}
        if hyper.tied is not None:
            out["tie_word_embeddings"] = hyper.tied
        return out | dict(self.always) | dict(self.written) | dict(self.more_config(hyper) if self.more_config else {})

    def to_metadata(self, hyper: Hyper) -> tuple[dict[str, Meta], tuple[str, ...]]:
        """Return (GGUF keys after the architecture's name, warnings about information they cannot express).

        Raises InputError.
        """
        scaling, warning = rope.scaling_metadata(hyper, known=self.yarn, log=self.yarn_log)
        out: dict[str, Meta] = {}
        for key in self.keys:
            if key.name == "rope_theta":
                out |= scaling
            if key.gguf is None or not key.written(hyper.value(key.name)):
                continue
            value = hyper.rotary_size if key.name == "rotated" else hyper.value(key.name)
            out |= dict.fromkeys((key.gguf, *key.also), key.meta(value))
        out |= {k: v for k, v in self.metadata.items() if k not in scaling}
        warnings = (warning, self.gguf_warning(hyper) if self.gguf_warning else None, self._lost_windows(hyper))
        return out | dict(self.more_metadata(hyper) if self.more_metadata else {}), tuple(w for w in warnings if w)

    def _lost_windows(self, hyper: Hyper) -> str | None:
        """Return a warning if readers of GGUF assume other windows than the configuration's."""
        if hyper.windows and self.gguf_windows is not None and hyper.windows != self.gguf_windows(hyper):
            return (
                "GGUF cannot express which layers have a sliding window: "
                "runtimes will follow the architecture's usual pattern"
            )
        return None


USUAL = HyperTable()
"""Llama's table, which most architectures share."""


def _one(value: Any) -> Any:
    """Reduce a list of equal per-layer values to that value."""
    if isinstance(value, Sequence) and not isinstance(value, str) and value and all(v == value[0] for v in value):
        return value[0]
    return value
