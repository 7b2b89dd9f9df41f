"""The installed codecs, recipes and formats: for `polyquant codecs`, `polyquant recipes` and `polyquant formats`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol, SupportsIndex, TypeVar, overload

import numpy as np

from polyquant import registry
from polyquant.errors import CodecError, UnknownNameError, UnsupportedError
from polyquant.formats.protocol import DeclaresCodecs, Format
from polyquant.options import options_of
from polyquant.recipes.reading import builtin_recipes
from polyquant.recipes.recipe import Facts, Recipe
from polyquant.tables import Listing
from polyquant.types import Affine, Blocks, Codec, Floats, Form, ScaledFloats, Ternary, TrellisCodes

__all__ = ["CodecInfo", "Codecs", "FormatInfo", "Formats", "RecipeInfo", "Recipes", "codecs", "formats", "recipes"]

FORMS: Mapping[type[Form], str] = {
    Floats: "floats", Ternary: "ternary", Affine: "affine", Blocks: "blocks", ScaledFloats: "small floats",
    TrellisCodes: "trellis",
}  # fmt: skip
_ABOUT = {
    "plain": "unquantized values of one dtype",
    "ggml_legacy": "ggml: small blocks with an fp16 scale, some with a minimum",
    "ggml_k": "ggml K-quants: super-blocks of 256 weights with quantized scales",
    "ggml_iq": "ggml IQ types: values from a codebook, 8 or 4 at a time",
    "ggml_fp4": "4-bit floats (E2M1) with a scale per block",
    "ggml_ternary": "ggml: ternary weights in blocks of 256 with an fp16 scale",
    "i2_s": "bitnet.cpp: ternary weights, 2 bits each, one scale per tensor",
    "trinity": "Trinity: ternary weights in blocks of 32",
    "tl": "bitnet.cpp: ternary weights in the order of its lookup-table kernels",
    "ggml_nvfp4": "ggml's NVFP4 with the scale of the tensor, stored by GGUF as a separate tensor",
    "hf_mxfp4": "MXFP4 of Hugging Face and MLX folders: codes and scales in two tensors",
    "hf_mxfp8": "MXFP8 of Hugging Face and MLX folders: 8-bit floats and powers of two in two tensors",
    "hf_nvfp4": "NVFP4 of Hugging Face and MLX folders: 4-bit floats with a scale per 16 columns and one per tensor",
    "hf_bitnet": "transformers' packed BitNet linears: ternary weights, one scale per tensor",
    "trellis": "Trellis v3: trellis-coded 16 x 16 tiles with Hadamard rotation",
    "metal_marlin": "Metal Marlin's variant of Trellis: a plain grid",
    "exl3": "ExLlamaV3's trellis-coded weights",
    "gptq": "GPTQ: codes of 2 to 8 bits with a scale per group",
    "awq": "AWQ: 4-bit codes with a scale per group",
    "fp8": "8-bit floats with scales (compressed-tensors, FBGEMM, DeepSeek, ModelOpt)",
    "bitsandbytes": "bitsandbytes: 4-bit codes of a table (NF4, FP4) with an absmax per block, or int8 rows",
    "modelopt_int4": "ModelOpt: 4-bit codes with a scale per group, also with AWQ's factors of the inputs",
    "hqq": "HQQ: codes of 1 to 8 bits with a scale and a fractional zero point per group",
    "torchao": "torchao: integer codes, one per byte, with scales",
    "msmodelslim": "msModelSlim (Ascend): int8 or int4 codes with scales; int4 takes a byte per code until a dialect "
    "packs it",
    "compressed_tensors": "compressed-tensors: int8 or int4 codes with scales",
    "chatglm_int": "ChatGLM: int8 or int4 codes with a scale per row",
    "mlx": "MLX: codes of 2 to 8 bits with a scale and a bias per group",
    "mlx_floats": "MLX: small floats with block scales",
}
"""Module of polyquant.codecs -> description of its codecs."""
_BIG = (4096, 4096)
"""Shape of the matrix whose stored bytes give a codec's bits per weight."""


class _Record(Protocol):
    @property
    def name(self) -> str:
        """The name of a codec, a recipe or a format."""


T = TypeVar("T", bound=_Record)


class _Named(Listing[T]):
    """A list of records that can be indexed by position or by name, shown completely."""

    most = 1000

    @overload
    def __getitem__(self, key: SupportsIndex | str, /) -> T: ...
    @overload
    def __getitem__(self, key: slice, /) -> list[T]: ...
    def __getitem__(self, key: SupportsIndex | str | slice, /) -> T | list[T]:
        """The record at a position, or the one of that name. Raises UnknownNameError."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        for entry in self:
            if entry.name == key:
                return entry
        raise UnknownNameError(self.title.removesuffix("s"), key, [entry.name for entry in self])


@dataclass(frozen=True, slots=True)
class CodecInfo:
    """One codec.

    form: "floats", "ternary", "affine", "blocks", "small floats" or "trellis"; `polyquant formats --matrix` tells
    which codecs keep the codes of which. bpw: bits per weight of a matrix [4096, 4096], including scales; None if it
    depends on the model. block: weights along a row that share a scale or must divide it. quantizes: False if
    read-only. read_by, written_by: format names.
    """

    name: str
    form: str
    bpw: float | None
    block: int
    quantizes: bool
    about: str
    read_by: tuple[str, ...]
    written_by: tuple[str, ...]

    @property
    def held_by(self) -> str:
        """Format names for display: "gguf", "gguf (copy only)" for a codec that does not quantize, "hf (read only)"."""
        copied = "" if self.quantizes else " (copy only)"
        only = [f"{name} (read only)" for name in self.read_by if name not in self.written_by]
        return ", ".join([*(name + copied for name in self.written_by), *only]) or "-"


class Codecs(_Named[CodecInfo]):
    """The result of `codecs()`."""

    title = "codecs"
    columns = ("codec", "bits per weight", "form", "formats", "description")

    def row(self, entry: CodecInfo) -> Sequence[object]:
        """The cells of one codec."""
        bpw = "-" if entry.bpw is None else f"{entry.bpw:.4g}"
        return entry.name, bpw, entry.form, entry.held_by, entry.about


@dataclass(frozen=True, slots=True)
class RecipeInfo:
    """One built-in recipe. base: codec of most matrices; codecs: all codecs it uses; bpw: for an 8B Llama 3; rules:
    their number.
    """

    name: str
    base: str
    codecs: tuple[str, ...]
    bpw: float
    rules: int


class Recipes(_Named[RecipeInfo]):
    """The result of `recipes()`."""

    title = "recipes"
    columns = ("recipe", "bits per weight (8B Llama)", "most matrices", "others")

    def row(self, entry: RecipeInfo) -> Sequence[object]:
        """The cells of one recipe."""
        others = ", ".join(name for name in entry.codecs if name != entry.base)
        return entry.name, f"{entry.bpw:.2f}", entry.base, others or "-"


@dataclass(frozen=True, slots=True)
class FormatInfo:
    """One format. files: a description of its files, "" if not declared. reads, writes: codec names; writes: empty if
    read-only.
    """

    name: str
    title: str
    files: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    writable: bool
    open_options: tuple[str, ...]
    options: tuple[str, ...]


class Formats(_Named[FormatInfo]):
    """The result of `formats()`."""

    title = "formats"
    columns = ("format", "files", "reads", "writes", "options of convert")

    def row(self, entry: FormatInfo) -> Sequence[object]:
        """The cells of one format."""
        writes = f"{len(entry.writes)} codecs" if entry.writes else "yes" if entry.writable else "-"
        return entry.name, entry.files or "-", f"{len(entry.reads)} codecs", writes, ", ".join(entry.options) or "-"


def codecs() -> Codecs:
    """All codecs, including installed packages; of families whose names contain options (trellis.3, gptq.4.g128) the
    usual ones.
    """
    having = [form for form in registry.formats() if isinstance(form, DeclaresCodecs)]
    return Codecs(info for name in registry.known_codecs() if (info := _codec_info(name, having)) is not None)


def recipes() -> Recipes:
    """The built-in recipes, from large to small."""
    infos = [_recipe_info(recipe) for recipe in builtin_recipes().values()]
    return Recipes(sorted(infos, key=lambda r: -r.bpw))


def formats() -> Formats:
    """All formats, including installed packages."""
    every = codecs()
    return Formats(_format_info(form, every) for form in registry.formats())


def _codec_info(name: str, having: Sequence[DeclaresCodecs]) -> CodecInfo | None:
    """The record of a codec; None for a family of another package ("my.*"), and with a warning if a plugin fails."""
    if name.endswith(".*"):
        return None
    try:
        return _described(name, registry.codec(name), having)
    except UnsupportedError as problem:
        warnings.warn(str(problem), registry.PluginWarning, stacklevel=3)
    except Exception as problem:
        if registry.module_of(name) is not None:
            raise
        blamed = registry.blamed_plugin(problem) or f"the plugin '{name}' is not a valid codec"
        message = f"{blamed}: {type(problem).__name__}: {problem}; '{name}' is not listed"
        warnings.warn(message, registry.PluginWarning, stacklevel=3)
    return None


def _described(name: str, codec: Codec, having: Sequence[DeclaresCodecs]) -> CodecInfo:
    return CodecInfo(
        name,
        FORMS[codec.form],
        _bits(codec),
        codec.granule[1],
        quantizes(codec),
        _about(name, codec),
        tuple(form.name for form in having if _declared(form, form.reads, codec)),
        tuple(form.name for form in having if _declared(form, form.writes, codec)),
    )


def _declared(form: DeclaresCodecs, declares: Callable[[Codec], bool], codec: Codec) -> bool:
    """The answer of a format; False, with a warning, if the format of another package raises."""
    try:
        return declares(codec)
    except Exception as problem:
        if form.name in registry.FORMATS:
            raise
        message = f"the plugin '{form.name}' failed: {type(problem).__name__}: {problem}"
        warnings.warn(message, registry.PluginWarning, stacklevel=3)
        return False


def quantizes(codec: Codec) -> bool:
    """True if the codec can quantize. The test input is NaN, which every codec rejects before any work."""
    try:
        codec.quantize(np.full(codec.granule, np.nan, np.float32))
    except UnsupportedError:
        return False
    except CodecError:
        return True
    return True


def _bits(codec: Codec) -> float | None:
    try:
        return 8 * sum(spec.nbytes for spec in codec.specs(_BIG).values()) / math.prod(_BIG)
    except CodecError:  # TL1 and TL2 have tiles only for known model shapes
        return None


def _about(name: str, codec: Codec) -> str:
    """The description of a built-in family; for an installed package its name."""
    module = registry.module_of(name)
    if module is not None:
        return _ABOUT[module]
    installed = {e.name: e for e in entry_points(group="polyquant.codecs")}
    entry = installed.get(name)
    return f"of the package {entry.dist.name}" if entry is not None and entry.dist is not None else type(codec).__name__


# An 8B Llama 3 by GGUF names: published bits per weight usually refer to these shapes.
_LAYERS, _HIDDEN, _KEYS, _INNER, _VOCABULARY = 32, 4096, 1024, 14336, 128256
_IN_LAYER = {
    "attn_q": (_HIDDEN, _HIDDEN),
    "attn_k": (_KEYS, _HIDDEN),
    "attn_v": (_KEYS, _HIDDEN),
    "attn_output": (_HIDDEN, _HIDDEN),
    "ffn_gate": (_INNER, _HIDDEN),
    "ffn_up": (_INNER, _HIDDEN),
    "ffn_down": (_HIDDEN, _INNER),
}
_FACTS = Facts(layers=_LAYERS, gqa=4)


def _matrices() -> Iterator[tuple[str, tuple[int, int]]]:
    yield "token_embd.weight", (_VOCABULARY, _HIDDEN)
    for layer in range(_LAYERS):
        yield from ((f"blk.{layer}.{stem}.weight", shape) for stem, shape in _IN_LAYER.items())
    yield "output.weight", (_VOCABULARY, _HIDDEN)


def _recipe_info(recipe: Recipe) -> RecipeInfo:
    assert recipe.base is not None, recipe.name
    bits, weights, used = 0.0, 0, dict.fromkeys([recipe.base])
    for name, shape in _matrices():
        chosen = recipe.choose((name,), _FACTS)[0] or recipe.base
        used[chosen] = None
        count = math.prod(shape)
        bits += count * _width(registry.codec(chosen))
        weights += count
    return RecipeInfo(recipe.name, recipe.base, tuple(used), bits / weights, len(recipe.rules))


def _width(codec: Codec) -> float:
    """Bits per weight; for TL1 and TL2, whose tiles depend on the model, the bits of a code."""
    bits = _bits(codec)
    return bits if bits is not None else {"tl1": 2.0, "tl2": 5 / 3}[codec.name]


def _format_info(form: Format, every: Codecs) -> FormatInfo:
    return FormatInfo(
        form.name,
        form.title,
        form.files if isinstance(form, DeclaresCodecs) else "",
        tuple(c.name for c in every if form.name in c.read_by),
        tuple(c.name for c in every if form.name in c.written_by),
        form.target is not None,
        tuple(options_of(form.open_options)),
        tuple(options_of(form.target.options)) if form.target is not None else (),
    )
