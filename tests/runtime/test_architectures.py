"""Every architecture against its judge: tests/vectors/runtime/README.md says how the logits were made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS, arrays

MODELS = VECTORS / "runtime"
NAMES = sorted(p.name for p in MODELS.iterdir() if p.is_dir())
UNSAID_BY_GGUF = {"mistral-window", "qwen2-windows", "llama-yarn-mscale"}
"""Sliding windows, mscale and truncate have no keys there."""


def close(found: np.ndarray, name: str) -> None:
    np.testing.assert_allclose(found, arrays(f"runtime/{name}/logits.npz")["logits"], rtol=0, atol=1e-4)


def tokens(name: str) -> np.ndarray:
    return arrays(f"runtime/{name}/logits.npz")["tokens"]


@pytest.mark.parametrize("name", NAMES)
def test_folders(name, engine):
    close(pq.load(MODELS / name).logits(tokens(name)), name)


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token(name):
    session = pq.load(MODELS / name).session()
    close(np.array([session.feed([t]) for t in tokens(name)]), name)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in UNSAID_BY_GGUF])
def test_converted_to_gguf_and_back(name, tmp_path):
    pq.convert(MODELS / name, tmp_path / "x.gguf", to="gguf", codec="f32")
    close(pq.load(tmp_path / "x.gguf").logits(tokens(name)), name)
    pq.convert(tmp_path / "x.gguf", tmp_path / "hf", to="hf", codec="f32")
    close(pq.load(tmp_path / "hf").logits(tokens(name)), name)


def test_biases_move_with_their_rows(tmp_path):
    pq.convert(MODELS / "llama-biases-wide-head", tmp_path / "x.gguf", to="gguf", codec="f32")
    compared = pq.compare(MODELS / "llama-biases-wide-head", tmp_path / "x.gguf")
    assert compared.error.worst == 0
