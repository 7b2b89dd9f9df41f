"""Names -> "module:attribute", resolved on first use, so that importing polyquant imports no codec.

Names that are not in the tables are looked up among the entry points of installed packages (groups `polyquant.codecs`
and `polyquant.formats`), so a new codec needs no change here; an entry point "word.*" is a function that parses all
names of a family. Architectures are matched by config.json or GGUF metadata: those of the group
`polyquant.architectures` are tried if no built-in one matches.

A codec names its search function the same way (`Search`), since layouts must not import searches.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, cast

from polyquant.errors import UnknownNameError, UnsupportedError, listed

if TYPE_CHECKING:
    from polyquant.architectures.record import Architecture
    from polyquant.formats.protocol import Format
    from polyquant.types import Codec

__all__ = [
    "ARCHITECTURES", "CODECS", "DEFAULT_TARGET", "FORMATS", "PluginWarning", "Search", "architectures",
    "blamed_plugin", "codec", "families", "format_named", "formats", "installed_architectures", "known_codecs",
    "members", "module_of",
]  # fmt: skip


def _family(module: str, names: str) -> dict[str, str]:
    """Attribute = codec name in upper case, with underscores for dots."""
    return {n: f"polyquant.codecs.{module}:{n.upper().replace('.', '_')}" for n in names.split()}


CODECS: dict[str, str] = {
    **_family("plain", "f32 f16 bf16 f64 i8 i16 i32 i64 u8 u16 u32 u64 bool f8_e4m3 f8_e5m2"),
    **_family("ggml_legacy", "q4_0 q4_1 q5_0 q5_1 q8_0 q8_1 q1_0 q2_0"),
    **_family("ggml_k", "q2_k q3_k q4_k q5_k q6_k q8_k"),
    **_family("ggml_iq", "iq1_s iq1_m iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq4_nl iq4_xs"),
    **_family("ggml_fp4", "mxfp4 nvfp4"),
    **_family("ggml_nvfp4", "nvfp4.scaled"),
    **_family("ggml_ternary", "tq1_0 tq2_0"),
    **_family("i2_s", "i2_s.x86 i2_s.arm i2_s.x4 trinity.i2_s"),
    **_family("trinity", "trinity.tq2_0"),
    **_family("tl", "tl1 tl2"),
    **_family("hf_mxfp4", "hf_mxfp4"),
    **_family("hf_mxfp8", "hf_mxfp8"),
    **_family("hf_bitnet", "hf_bitnet.autobitlinear hf_bitnet.bitlinear"),
    **_family("trellis", "trellis.2 trellis.3 trellis.4 trellis.5 trellis.6 trellis.7 trellis.8"),
}
_ANY_PACKING = {
    "int4": ("compressed.p4.g128", "gptq.4.g128", "awq.4.g128", "mlx.4.g64", "q4_0"),
    "int8": ("compressed.i8", "compressed.p8.g128", "w8a16", "q8_0"),
}
"""Word for weights of some bits, in any packing -> codecs that are meant, one of each packing."""
_NAMED = (
    {n: n for n in ("trellis", "metal_marlin", "exl3", "gptq", "awq", "fp8", "mlx", "hf_nvfp4", "hqq", "torchao")}
    | dict.fromkeys(("w8a16", "w8a8", "w8a8s", "w4a16", "w4a8"), "msmodelslim")
    | {
        "compressed": "compressed_tensors",
        "chatglm": "chatglm_int",
        "bnb": "bitsandbytes",
        "modelopt": "modelopt_int4",
        "nvfp4": "ggml_nvfp4",
    }
)
"""First part of a name -> module, for families with many members: each module parses its names."""
FORMATS: dict[str, str] = {  # in descending order of priority
    "msmodelslim": "polyquant.formats.msmodelslim.format:MSMODELSLIM",
    "gguf": "polyquant.formats.gguf.format:GGUF",
    "trellis-v3": "polyquant.formats.trellis.format:TRELLIS",
    "hf": "polyquant.formats.huggingface.format:HUGGINGFACE",
}
DEFAULT_TARGET = "hf"
"""The target format if neither a name nor an option determines it."""
ARCHITECTURES: dict[str, str] = {
    "llama": "polyquant.architectures.llama:LLAMA",
    "mistral": "polyquant.architectures.llama:MISTRAL",
    "qwen2": "polyquant.architectures.qwen:QWEN2",
    "qwen3": "polyquant.architectures.qwen:QWEN3",
    "qwen2moe": "polyquant.architectures.qwen_moe:QWEN2_MOE",
    "qwen3moe": "polyquant.architectures.qwen_moe:QWEN3_MOE",
    "qwen3next": "polyquant.architectures.qwen3_next:QWEN3_NEXT",
    "qwen35moe": "polyquant.architectures.qwen35:QWEN35_MOE",
    "qwen35": "polyquant.architectures.qwen35:QWEN35",
    "gpt2": "polyquant.architectures.gpt2:GPT2",
    "mixtral": "polyquant.architectures.mixtral:MIXTRAL",
    "olmoe": "polyquant.architectures.olmoe:OLMOE",
    "minimax-m2": "polyquant.architectures.minimax_m2:MINIMAX_M2",
    "nemotron": "polyquant.architectures.nemotron:NEMOTRON",
    "cohere2": "polyquant.architectures.cohere2:COHERE2",
    "gpt-oss": "polyquant.architectures.gpt_oss:GPT_OSS",
    "glm4": "polyquant.architectures.glm4:GLM4",
    "glm4moe": "polyquant.architectures.glm4_moe:GLM4_MOE",
    "deepseek-v2": "polyquant.architectures.deepseek:DEEPSEEK_V2",
    "deepseek-v3": "polyquant.architectures.deepseek:DEEPSEEK_V3",
    "ernie4_5-moe": "polyquant.architectures.ernie4_5_moe:ERNIE4_5_MOE",
    "llama4": "polyquant.architectures.llama4:LLAMA4",
    "gemma": "polyquant.architectures.gemma:GEMMA",
    "gemma2": "polyquant.architectures.gemma:GEMMA2",
    "gemma3": "polyquant.architectures.gemma3:GEMMA3",
    "gemma4": "polyquant.architectures.gemma4:GEMMA4",
    "phi2": "polyquant.architectures.phi:PHI2",
    "phi3": "polyquant.architectures.phi:PHI3",
    "stablelm": "polyquant.architectures.stablelm:STABLELM",
    "starcoder2": "polyquant.architectures.starcoder2:STARCODER2",
    "bloom": "polyquant.architectures.bloom:BLOOM",
    "falcon": "polyquant.architectures.falcon:FALCON",
    "smollm3": "polyquant.architectures.smollm3:SMOLLM3",
    "granite": "polyquant.architectures.granite:GRANITE",
    "granitemoe": "polyquant.architectures.granite:GRANITE_MOE",
    "granitemoe-shared": "polyquant.architectures.granite:GRANITE_MOE_SHARED",
    "olmo": "polyquant.architectures.olmo:OLMO",
    "olmo2": "polyquant.architectures.olmo2:OLMO2",
    "olmo3": "polyquant.architectures.olmo2:OLMO3",
    "gptneox": "polyquant.architectures.gpt_neox:GPT_NEOX",
    "exaone4": "polyquant.architectures.exaone4:EXAONE4",
    "internlm2": "polyquant.architectures.internlm2:INTERNLM2",
    "baichuan": "polyquant.architectures.baichuan:BAICHUAN",
    "minicpm": "polyquant.architectures.minicpm:MINICPM",
    "hunyuan-dense": "polyquant.architectures.hunyuan:HUNYUAN_DENSE",
    "command-r": "polyquant.architectures.cohere:COHERE",
    "ernie4_5": "polyquant.architectures.ernie4_5:ERNIE4_5",
    "seed_oss": "polyquant.architectures.seed_oss:SEED_OSS",
    "apertus": "polyquant.architectures.apertus:APERTUS",
    "bitnet-b1.58": "polyquant.architectures.bitnet:BITNET_B158",
    "bitnet-25": "polyquant.architectures.bitnet:BITNET_25",
    "bitnet": "polyquant.architectures.bitnet:BITNET",
    "chatglm": "polyquant.architectures.chatglm:CHATGLM",
    "bert": "polyquant.architectures.bert:BERT",
    "nomic-bert": "polyquant.architectures.nomic_bert:NOMIC_BERT",
    "modern-bert": "polyquant.architectures.modern_bert:MODERN_BERT",
    "mamba2": "polyquant.architectures.mamba:MAMBA2",
    "lfm2": "polyquant.architectures.lfm2:LFM2",
    "lfm2moe": "polyquant.architectures.lfm2_moe:LFM2_MOE",
    "granitehybrid-moe": "polyquant.architectures.granite_hybrid:GRANITE_HYBRID_MOE",
    "granitehybrid": "polyquant.architectures.granite_hybrid:GRANITE_HYBRID",
    "falcon-h1": "polyquant.architectures.falcon_h1:FALCON_H1",
    "nemotron_h_moe-latent": "polyquant.architectures.nemotron_h_moe:NEMOTRON_H_LATENT",
    "nemotron_h_moe": "polyquant.architectures.nemotron_h_moe:NEMOTRON_H_MOE",
    "nemotron_h": "polyquant.architectures.nemotron_h:NEMOTRON_H",
}


@cache
def _attribute(place: str) -> Callable[..., Any]:
    module, attribute = place.split(":")
    function: Callable[..., Any] = getattr(import_module(module), attribute)
    return function


@dataclass(frozen=True, slots=True)
class Search:
    """A function at "module:attribute", imported on its first call.

    The search field of codecs that use a module of `quantizers`; codecs of other packages may use any callable.
    """

    place: str

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function."""
        return _attribute(self.place)(*arguments, **options)


_GROUPS = ("polyquant.codecs", "polyquant.formats", "polyquant.architectures")


class PluginWarning(UserWarning):
    """A plugin of an installed package is unusable and was skipped."""


def _entry_points(group: str) -> dict[str, Any]:
    from importlib.metadata import entry_points

    return {e.name: e for e in entry_points(group=group)}


def _loaded(entry: Any) -> Any:
    """Load an entry point. Raises UnsupportedError with its name if loading fails in any way."""
    try:
        return entry.load()
    except (Exception, SystemExit) as problem:
        raise UnsupportedError(
            f"the plugin '{entry.name}' cannot be loaded: {type(problem).__name__}: {problem}",
            hint=f"reinstall or remove the package {_package(entry)}",
        ) from problem


def _package(entry: Any) -> str:
    """The package of an entry point, for display."""
    return f"'{entry.dist.name}'" if entry.dist else f"with {entry.value}"


def _usable(group: str) -> dict[str, Any]:
    """Name -> object of every loadable entry point of the group; a PluginWarning for each other."""
    out = {}
    for name, entry in _entry_points(group).items():
        try:
            out[name] = _loaded(entry)
        except UnsupportedError as problem:
            warnings.warn(str(problem), PluginWarning, stacklevel=2)
    return out


@cache
def _load(name: str) -> Any:
    if name in CODECS:
        module, attribute = CODECS[name].split(":")
        return getattr(import_module(module), attribute)
    family = _NAMED.get(name.partition(".")[0])
    if family is not None:
        return getattr(import_module(f"polyquant.codecs.{family}"), f"{family}_named")(name)
    plugins = _entry_points("polyquant.codecs")
    if name in plugins:
        return _loaded(plugins[name])
    whole_family = f"{name.partition('.')[0]}.*"
    if whole_family in plugins:
        return _loaded(plugins[whole_family])(name)
    if layouts := [known for known in CODECS if name in known.split(".")]:
        raise UnknownNameError("codec", name, layouts, hint=f"it has several layouts: {', '.join(layouts)}")
    if name in _ANY_PACKING:
        raise UnknownNameError("codec", name, _ANY_PACKING[name], hint=f"choose {' or '.join(_ANY_PACKING[name])}")
    if name in _NAMED.values():  # a family's module name, not a codec
        raise UnknownNameError("codec", name, _members(name))
    raise UnknownNameError("codec", name, known_codecs())


def families() -> list[str]:
    """First words of the built-in names that contain options: "gptq" of gptq.4.g128."""
    return list(_NAMED)


def members(word: str) -> list[str]:
    """Common names of the family with this first word."""
    return [name for name in _members(_NAMED[word]) if name.partition(".")[0] == word]


def _members(family: str) -> tuple[str, ...]:
    """Common names of a family's members."""
    names: tuple[str, ...] = import_module(f"polyquant.codecs.{family}").NAMES
    return names


def module_of(name: str) -> str | None:
    """The module of polyquant.codecs with a built-in codec; None for one of an installed package."""
    if name in CODECS:
        return CODECS[name].partition(":")[0].rpartition(".")[2]
    return _NAMED.get(name.partition(".")[0])


def known_codecs() -> list[str]:
    """The names of all codecs, including installed packages; for families with options, the common names."""
    families = [name for family in dict.fromkeys(_NAMED.values()) for name in _members(family)]
    return list(dict.fromkeys((*CODECS, *families, *_entry_points("polyquant.codecs"))))


def codec(name: str | Codec, **options: Any) -> Codec:
    """The codec of that name, e.g. `codec("q4_k")`; options for configurable codecs, e.g. `codec("tl1", tile=...)`.

    Raises UnknownNameError with similar names; TypeError for an option the codec does not have.
    """
    result: Codec = _load(name.lower()) if isinstance(name, str) else name
    if not options:
        return result
    from polyquant.capabilities import Configurable  # imports numpy, which listing names does not need

    if not isinstance(result, Configurable):
        raise TypeError(f"codec '{result}' takes no options, found {', '.join(options)}")
    return result.configure(**options)


@cache
def format_named(name: str) -> Format:
    """The format of that name. Raises UnknownNameError."""
    if name in FORMATS:
        builtin: Any = _attribute(FORMATS[name])
        return cast("Format", builtin)
    installed = _installed_formats()
    if name not in installed:
        raise UnknownNameError("format", name, [*FORMATS, *installed])
    return installed[name]


def formats() -> Iterator[Format]:
    """All formats, including installed packages, in order of detection; of equal priority built-in ones come first.

    Each is imported when reached, so a path that the first one recognises imports no other. Warns about packages that
    cannot be loaded.
    """
    others = sorted(_installed_formats().values(), key=lambda f: (-f.priority, f.name))
    for name in FORMATS:
        ours = format_named(name)
        while others and others[0].priority > ours.priority:
            yield others.pop(0)
        yield ours
    yield from others


@cache
def _installed_formats() -> dict[str, Format]:
    """The formats of other packages by name."""
    out: dict[str, Format] = {}
    for name, form in _usable("polyquant.formats").items() if _mentions("polyquant.formats") else ():
        if name in FORMATS or getattr(form, "name", None) != name:
            why = "already exists" if name in FORMATS else f"has the attribute name '{getattr(form, 'name', form)}'"
            warnings.warn(f"the plugin '{name}' is skipped: a format of this name {why}", PluginWarning, stacklevel=2)
        elif lacking := [member for member, kind in _MEMBERS.items() if not _has(form, member, kind)]:
            why = f"its format has no valid {listed(lacking, len(lacking))}"
            warnings.warn(f"the plugin '{name}' is skipped: {why}", PluginWarning, stacklevel=2)
        elif (problem := _options_problem(form)) is not None:
            why = f"its options cannot be read: {type(problem).__name__}: {problem}"
            warnings.warn(f"the plugin '{name}' is skipped: {why}", PluginWarning, stacklevel=2)
        else:
            out[name] = form
    return out


def _options_problem(form: Any) -> Exception | None:
    """The exception raised by reading the option classes, which `--help` and detection need of every format."""
    try:
        fields(form.open_options)
        if hasattr(form, "target_options"):
            options = form.target_options
        else:
            options = None if form.target is None else form.target.options
        if options is not None:
            fields(options)
    except Exception as problem:  # noqa: BLE001 - a plugin may raise anything
        return problem
    return None


def blamed_plugin(problem: BaseException) -> str | None:
    """Describe the plugin whose code raised an unexpected exception: its name, package and line; None for our own.

    The innermost frame counts that runs code of an entry point's module or package, or a method of its classes.
    """
    if not any(map(_mentions, _GROUPS)):
        return None
    entries: dict[str, list[Any]] = {}
    for entry in (e for group in _GROUPS for e in _entry_points(group).values()):
        entries.setdefault(entry.module.partition(".")[0], []).append(entry)
    entries.pop("polyquant", None)
    found = None
    for frame, line in walk_tb(problem.__traceback__):
        modules = (frame.f_globals.get("__name__"), type(frame.f_locals.get("self")).__module__)
        found_in = next((entries[top] for name in modules if (top := str(name).partition(".")[0]) in entries), None)
        if found_in is not None:
            place = f"{Path(frame.f_code.co_filename).name}, line {line}"
            names = listed(dict.fromkeys(f"'{e.name}'" for e in found_in))
            found = f"the plugin {names} of the package {_package(found_in[0])} failed ({place})"
    return found


_MEMBERS: dict[str, Any] = {
    "title": str, "priority": int, "open_options": type, "sniff": Callable, "open": Callable,
}  # fmt: skip
"""Members of a format that detecting and opening any path requires."""


def _has(form: Any, member: str, kind: type) -> bool:
    """True if the member exists with this type, even if accessing it raises in a plugin."""
    try:
        return isinstance(getattr(form, member), kind)
    except Exception:  # noqa: BLE001 - a plugin may raise anything
        return False


def _mentions(group: str) -> bool:
    """True if a package on the path has entry points of the group. Reads small files; importlib.metadata would take 40
    ms.
    """
    wanted = f"[{group}]".encode()
    for folder in sys.path:
        with suppress(OSError), os.scandir(folder or ".") as entries:
            for entry in entries:
                if not entry.name.endswith((".dist-info", ".egg-info")):
                    continue
                with suppress(OSError):
                    if wanted in Path(entry.path, "entry_points.txt").read_bytes():
                        return True
    return False


@cache
def architectures(keys: frozenset[str] | None = None) -> tuple[Architecture, ...]:
    """The built-in records, or those of some keys, in the order of ARCHITECTURES; importing all takes 20 ms."""
    ours = [path.split(":") for key, path in ARCHITECTURES.items() if keys is None or key in keys]
    return tuple(getattr(import_module(module), attribute) for module, attribute in ours)


@cache
def installed_architectures() -> tuple[Architecture, ...]:
    """The records of installed packages."""
    return tuple(_usable("polyquant.architectures").values()) if _mentions("polyquant.architectures") else ()
