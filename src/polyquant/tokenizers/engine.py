"""The `tokenizers` package (extra `run`): imported when it is used, its failures turned into one line each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from polyquant.errors import InputError, PolyquantError, UnsupportedError, printable

__all__ = ["guarded", "installed", "package", "stage"]

T = TypeVar("T")


def installed() -> bool:
    """Whether the package can be imported."""
    try:
        package()
    except UnsupportedError:
        return False
    return True


def package() -> Any:
    """The package. Raises UnsupportedError where it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise UnsupportedError("text needs the package 'tokenizers'", hint="pip install 'polyquant[run]'") from None
    return tokenizers


def stage(kind: str, node: Mapping[str, Any]) -> Any:
    """One stage of a tokenizer.json, e.g. its "pre_tokenizer", as an object that runs. Raises what the package raises."""
    model: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "vocab": {}, "merges": []}
    body: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model, kind: node}  # fmt: skip
    return getattr(package().Tokenizer.from_str(json.dumps(body)), kind)


def guarded(call: Callable[[], T], what: str, file: object) -> T:
    """What `call` gives. The package raises bare `Exception`, and lets panics of its Rust code through as a BaseException that has no
    public name: both become InputError."""
    try:
        return call()
    except BaseException as e:
        if isinstance(e, PolyquantError) or not (type(e) is Exception or type(e).__name__ == "PanicException"):
            raise
        raise InputError(f"{what}: {printable(e)}", file=file) from None
