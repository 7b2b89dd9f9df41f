"""`polyquant edit`: what an edit makes wrong is reported, and only that."""

import polyquant as pq
from polyquant.analysis.demo import demo_model


def test_what_becomes_wrong_is_reported(polyquant, tmp_path):
    path = tmp_path / "m.gguf"
    pq.convert(demo_model("llama"), path, codec="bf16")
    good = polyquant("edit", path, "--set", "general.name='Other'")
    assert (good.code, good.err) == (0, "")
    broken = polyquant("edit", path, "--set", "llama.block_count=40")
    assert broken.code == 0 and "warning: MOD001 40 layers are declared" in broken.err
    later = polyquant("edit", path, "--set", "general.name='Again'")  # known before
    assert (later.code, later.err) == (0, "")
    tokens = polyquant("edit", path, "--set", "tokenizer.ggml.bos_token_id=99999")
    assert "GGUF033" in tokens.err and "MOD001" not in tokens.err
