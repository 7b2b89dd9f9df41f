"""Access to the `tokenizers` package (extra `run`), imported on first use; its failures become one-line errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from polyquant.errors import InputError, PolyquantError, UnsupportedError, printable

__all__ = ["guarded", "installed", "package", "stage"]

T = TypeVar("T")


def installed() -> bool:
    """True if the package can be imported."""
    try:
        package()
    except UnsupportedError:
        return False
    return True


def package() -> Any:
    """Return the package. Raises UnsupportedError if it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise UnsupportedError("text requires the package 'tokenizers'", hint="pip install 'polyquant[run]'") from None
    return tokenizers


def stage(kind: str, node: Mapping[str, Any]) -> Any:
    """Return a runnable stage of a tokenizer.json, e.g. its "pre_tokenizer". Raises the package's own exceptions."""
    model: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "vocab": {}, "merges": []}
    body: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model, kind: node,
    }  # fmt: skip
    return getattr(package().Tokenizer.from_str(json.dumps(body)), kind)


def guarded(call: Callable[[], T], what: str, file: object) -> T:
    """Return the result of `call`, with its failures as InputError.

    The package raises bare `Exception`, and Rust panics surface as a BaseException without a public name.
    """
    try:
        return call()
    except BaseException as e:
        if isinstance(e, PolyquantError) or not (type(e) is Exception or type(e).__name__ == "PanicException"):
            raise
        raise InputError(f"{what}: {printable(e)}", file=file) from None
