"""Digests of many conversions, as a program: conversions.py THREADS GROUP... prints JSON, name -> SHA-256.

Groups: "plain" (no calibration), "slow" (long without native kernels), "calibrated" (a Hessian chooses the codes),
"slow calibrated" (both).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import polyquant
from golden import VECTORS
from polyquant.architectures.find import by_name
from polyquant.testing.architectures import tiny_model

LLAMA, BITNET = VECTORS / "models/tiny-llama-tied/hf", VECTORS / "models/tiny-bitnet/hf"
BLOCKS = (
    *("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q1_0", "q2_0", "q2_k", "q3_k", "q4_k", "q5_k"),
    *("q6_k", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4", "tq1_0", "tq2_0", "trinity.tq2_0"),
)
TERNARY = ("i2_s.x86", "i2_s.arm", "i2_s.x4", "trinity.i2_s", "trinity.tq2_0", "tq1_0", "tq2_0")
SIMPLE = ("w8a16", "w8a16.g32", "w4a16", "w8a8.dynamic", "w4a8.dynamic")
Case = tuple[Path, str, dict[str, Any]]
"""Source, target and options of a conversion."""


def cases(tiny: Path, text: Path) -> dict[str, dict[str, Case]]:
    """Group -> name -> case. tiny: a model of float32; text: calibration samples."""
    plain: dict[str, Case] = {f"gguf {c}": (LLAMA, "m.gguf", {"codec": c}) for c in BLOCKS}
    plain |= {f"gguf {r}": (LLAMA, "m.gguf", {"recipe": r}) for r in ("q2_k", "q3_k_s", "q4_k_m", "iq4_xs")}
    plain |= {f"bitnet {c}": (BITNET, "m.gguf", {"codec": c}) for c in TERNARY}
    tiles = {"tl1": (64, 64, 32), "tl2": (64, 96, 32)}
    plain |= {f"bitnet {c}": (BITNET, "m.gguf", {"codec": c, "tile": tile}) for c, tile in tiles.items()}
    plain["hf f16"] = (LLAMA, "hf", {"to": "hf", "codec": "f16"})
    plain |= {f"msmodelslim {c}": (tiny, "w", {"to": "msmodelslim", "codec": c}) for c in SIMPLE}
    plain["trellis.3.grid"] = (tiny, "v3", {"codec": "trellis.3.grid"})
    slow: dict[str, Case] = {
        c: (tiny, "v3", {"codec": c}) for c in ("trellis.2.mul1.12", "trellis.4.mcg.12", "trellis.3.3inst.12")
    }
    slow["trellis 4.5 bpw"] = (tiny, "v3", {"to": "trellis-v3", "target_bpw": 4.5, "effort": "fast"})
    to = {"to": "msmodelslim", "calibration": text}
    calibrated: dict[str, Case] = {
        "w8a8": (tiny, "w", {**to, "codec": "w8a8"}),
        "gptq w8a8": (tiny, "w", {**to, "codec": "w8a8", "effort": "max"}),
        "gptq w4a16": (tiny, "w", {**to, "codec": "w4a16", "effort": "max"}),
        "c8": (tiny, "w", {**to, "codec": "w8a8", "kv": "c8"}),
        "keep auto": (tiny, "w", {**to, "codec": "w8a8", "keep": ("auto",)}),
    }
    calibrated |= {f"smooth {s}": (tiny, "w", {**to, "codec": "w8a8", "smooth": s}) for s in ("m1", "m4", "shift")}
    both: dict[str, Case] = {"ldlq": (tiny, "v3", {"codec": "trellis.3.mul1.12", "calibration": text})}
    return {"plain": plain, "slow": slow, "calibrated": calibrated, "slow calibrated": both}


def digest(path: Path) -> str:
    """SHA-256 of a file, or of the names and bytes in a folder."""
    out = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
        out.update(file.name.encode() + b"\0" + file.read_bytes())
    return out.hexdigest()


def main(threads: int, groups: list[str]) -> None:
    """Print the digests."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        record = by_name("llama")
        assert record is not None
        tiny, text = tiny_model(record, top / "tiny"), top / "text.json"
        rng = np.random.default_rng(5)
        text.write_text(json.dumps([rng.integers(0, 32, 64).tolist() for _ in range(4)]))
        by_group = cases(tiny, text)
        for group in groups:
            for case, (source, target, options) in by_group[group].items():
                polyquant.convert(source, top / target, threads=threads, **options)
                found[case] = digest(top / target)
                shutil.rmtree(top / target) if (top / target).is_dir() else (top / target).unlink()
        if "calibrated" in groups:
            polyquant.importance(tiny, top / "imatrix.gguf", calibration=text)
            found["importance"] = digest(top / "imatrix.gguf")
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
