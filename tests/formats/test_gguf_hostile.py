"""Mutated and truncated files: a one-line PolyquantError, or a checkpoint whose parts can all be read."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from format_modules import gguf
from formats.gguf_files import GGUF_VECTORS, SMALL, mutate, saved, sound
from golden import VECTORS
from polyquant.errors import PolyquantError
from polyquant.types import Severity

SEEDS = [
    *(p.read_bytes() for p in GGUF_VECTORS),
    sound(),
    (VECTORS / "bitnet_gguf/tiny-bitnet-b158-tl2.gguf").read_bytes()[:40_000],
]


def survives(path):
    """Open, check and edit a file that may be anything; opening and checking agree on whether it is sound."""
    start = time.process_time()
    try:
        checkpoint = gguf.open(path)
    except PolyquantError as e:
        assert "\n" not in str(e)
        opened = False
    else:
        opened = True
        assert sum(len(part) for w in checkpoint.values() for part in w.read().values()) >= 0
        for key in checkpoint.metadata:
            try:
                gguf.plain(checkpoint.metadata[key])
            except PolyquantError as e:
                assert "UTF-8" in str(e)
    errors = [f for f in gguf.check(path) if f.severity is Severity.ERROR and f.code not in ("GGUF027", "GGUF028")]
    if opened:
        assert not [f for f in errors if f.code != "GGUF032"]
    try:
        gguf.edit(path, path.with_suffix(".copy"), overwrite=True)
    except PolyquantError:
        pass
    else:
        gguf.open(path.with_suffix(".copy"))
    assert time.process_time() - start < 1


def test_truncated_at_every_byte(tmp_path):
    raw = SMALL.read_bytes()
    path = tmp_path / "x.gguf"
    for n in range(len(raw)):
        saved(tmp_path, raw[:n])
        found = [f.code for f in gguf.check(path) if f.severity is Severity.ERROR]
        try:
            gguf.open(path)
        except PolyquantError as e:
            assert "\n" not in str(e) and found
        else:  # only the padding after the last tensor is missing
            assert n >= len(raw) - 22 and not found, n


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.integers(0, len(SEEDS) - 1), seed=st.integers(0, 2**32))
def test_mutations(tmp_path, which, seed):
    survives(saved(tmp_path, mutate(SEEDS[which], seed)))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=400))
def test_noise_after_a_valid_header(tmp_path, raw):
    survives(saved(tmp_path, sound()[:24] + raw))


@pytest.mark.slow
def test_many_mutations(tmp_path):
    for seed in range(30_000):
        survives(saved(tmp_path, mutate(SEEDS[seed % len(SEEDS)], seed)))
