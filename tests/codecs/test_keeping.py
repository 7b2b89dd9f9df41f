"""Verdicts on weights: decided once per plan, and from the largest scale where only overflow can round a bias."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import polyquant as pq
from polyquant.codecs import affine_forms
from polyquant.codecs.keeping import Fate, keeps, resolved
from polyquant.rows import in_memory
from polyquant.types import Weight


def test_a_plan_reads_the_scales_of_each_weight_once(demo_files, monkeypatch) -> None:
    read: Counter[str] = Counter()
    largest = affine_forms._largest

    def counted(weight, matrix):
        read[weight.name] += 1
        return largest(weight, matrix)

    monkeypatch.setattr(affine_forms, "_largest", counted)
    source = demo_files("llama", "q4_0")
    pq.plan(source, "mlx")
    assert read and set(read.values()) == {1}
    pq.plan(source, "mlx")  # another plan reads them again: the file may have changed
    assert set(read.values()) == {2}


@pytest.mark.parametrize("scale", [-8188.0, 8188.0, 8192.0, -9000.0, 6e-8, np.inf, np.nan])
@pytest.mark.parametrize("name", ["q4_0", "q5_0", "q8_0"])
def test_the_largest_scale_decides_as_all_scales_do(name: str, scale: float) -> None:
    codec, bits = pq.codec(name), int(name[1])
    parts = dict(codec.pack(codec.quantize(np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32))))
    parts["blocks"].reshape(6, -1)[4, :2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    weight = Weight("w", (3, 64), codec, in_memory(parts))
    target = pq.codec(f"mlx.{bits}.g32.f16")
    have, want = affine_forms.integers_of(weight.codec), affine_forms.integers_of(target)
    assert have is not None and want is not None
    general = keeps(have, want, 64)
    full = resolved(general, have, want, affine_forms._tables(weight, (3, 64)))
    found = affine_forms.verdict(weight, target)
    assert found == full and (found.fate is Fate.EXACT) == (abs(scale) <= 65504 / 2 ** (bits - 1) or scale == np.inf)
