"""Valid tensors give no findings; each violated rule gives its own."""

import json
import shutil

import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS
from polyquant.errors import UnknownNameError
from polyquant.types import Severity

SOUND = sorted(VECTORS.glob("models/*/*.gguf")) + [
    VECTORS / "models" / m / "hf" for m in ("tiny-llama-tied", "tiny-llama-untied", "tiny-bitnet")
]


def serious(path, **options):
    return [str(f) for f in pq.validate(path, **options) if f.severity is not Severity.NOTE]


@pytest.mark.parametrize("path", SOUND, ids=lambda p: p.name if p.suffix else p.parent.name)
def test_output_of_real_programs_is_valid(path):
    allowed = (
        "GGUF026" if "bigendian" in path.name else "none"
    )  # most runtimes refuse that byte order, as the finding explains
    assert [line for line in serious(path) if allowed not in line] == []


def edited(tmp_path, offset, data):
    path = tmp_path / "x.gguf"
    shutil.copy(VECTORS / "bitnet_gguf" / "tiny-bitnet-b158-i2_s-x86_128.gguf", path)
    raw = bytearray(path.read_bytes())
    name = "blk.0.attn_q.weight"
    start = raw.index(pq.open(path)[name].parts["blocks"].tobytes()[:64])
    raw[start + offset : start + offset + len(data)] = data
    path.unlink()
    path.write_bytes(raw)
    return path


def test_undefined_symbols_are_counted(tmp_path):
    found = [f for f in pq.validate(edited(tmp_path, 0, b"\xff" * 8)) if f.code == "TEN002"]
    assert [f.tensor for f in found] == ["blk.0.attn_q.weight"]
    assert found[0].message.startswith("32 symbols")


def test_a_nan_scale_is_reported(tmp_path):
    path = edited(tmp_path, 256 * 256 // 4, np.float32("nan").tobytes())
    assert [f.tensor for f in pq.validate(path) if f.code == "TEN001"] == ["blk.0.attn_q.weight"]


def test_a_different_symbol_order_is_reported(tmp_path):
    pq.convert(VECTORS / "bitnet_gguf" / "hf_packed_autobitlinear", tmp_path / "t.gguf", codec="trinity.i2_s")
    assert not [f for f in pq.validate(tmp_path / "t.gguf", ternary_layout="trinity.i2_s") if f.code == "TEN003"]


def test_a_wrong_layout_is_reported_with_against(tmp_path):
    arm = VECTORS / "bitnet_gguf" / "tiny-bitnet-b158-i2_s-arm_64.gguf"
    source = VECTORS / "bitnet_gguf" / "hf_packed_autobitlinear"
    assert any("CMP002" in line for line in serious(arm, against=source))
    assert serious(arm, against=source, ternary_layout="i2_s.arm") == []


def test_missing_layers_are_reported(tmp_path):
    folder = shutil.copytree(VECTORS / "models" / "tiny-llama-tied" / "hf", tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert any("MOD001" in line for line in serious(folder))


def test_explain_knows_every_code_and_suggests_similar_ones():
    assert "NaN" in pq.explain("ten001")
    with pytest.raises(UnknownNameError, match="GGUF012"):
        pq.explain("GGUF12")
