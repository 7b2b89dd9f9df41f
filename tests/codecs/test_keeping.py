"""Verdicts on weights are decided once per plan."""

from __future__ import annotations

from collections import Counter

import polyquant as pq
from polyquant.codecs import affine_forms


def test_a_plan_reads_the_scales_of_each_weight_once(demo_files, monkeypatch) -> None:
    read: Counter[str] = Counter()
    tables = affine_forms._tables

    def counted(weight, matrix):
        read[weight.name] += 1
        return tables(weight, matrix)

    monkeypatch.setattr(affine_forms, "_tables", counted)
    source = demo_files("llama", "q4_0")
    pq.plan(source, "mlx")
    assert read and set(read.values()) == {1}
    pq.plan(source, "mlx")  # another plan reads them again: the file may have changed
    assert set(read.values()) == {2}
