"""Record digests of many conversions, to show that a refactoring changes no byte.

    python scripts/conversion_digests.py record before.json        # with the old code
    python scripts/conversion_digests.py compare before.json       # with the new code: prints differences, else exit 0

A case is a source (a test vector or an embedded model), a target format and options. Its record has digests of each
file, of the plan's steps and of its messages (reasons, warnings), or the kind of error. Sources that open are also
validated: the codes of their findings are recorded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import polyquant as pq
from polyquant.errors import PolyquantError

ROOT = Path(__file__).resolve().parent.parent
VECTORS = ROOT / "tests" / "vectors"
DEMO = ROOT / "src" / "polyquant" / "demo"
TARGETS = ("gguf", "hf", "trellis-v3", "msmodelslim")
LLAMA = "vectors/models/tiny-llama-untied/hf"
BITNET = "vectors/models/tiny-bitnet/hf"
QWEN = "vectors/msmodelslim/models/qwen2_fp16"
Options = dict[str, Any]


def sources() -> Iterator[str]:
    """Yield every model among the test vectors."""
    paths = {p.parent for p in VECTORS.rglob("*.safetensors")} | {p.parent for p in VECTORS.rglob("config.json")}
    paths = {p.parent if p.name.startswith("layer_") else p for p in paths} | set(VECTORS.rglob("*.gguf"))
    paths |= set(VECTORS.glob("hf_bin/*.bin"))
    yield from sorted(f"vectors/{p.relative_to(VECTORS)}" for p in paths)


def located(source: str) -> Path:
    """Return the path for a source's short name."""
    top, _, rest = source.partition("/")
    return {"vectors": VECTORS, "demo": DEMO}[top] / rest


def cases() -> Iterator[tuple[str, str, Options]]:
    """Yield (source, target format, options)."""
    for source in sources():
        for to in TARGETS:
            yield source, to, {}
            yield (
                source,
                to,
                {
                    "codec": {"gguf": "q8_0", "hf": "f16", "trellis-v3": "trellis.3.mul1.12", "msmodelslim": "w8a16"}[
                        to
                    ],
                    "requantize": True,
                },
            )
    for recipe in tomllib.loads(next((ROOT / "src").rglob("recipes.toml")).read_text()):
        yield "demo/llama", "gguf", {"recipe": recipe}
    for codec in ("i2_s.x86", "i2_s.arm", "i2_s.x4", "trinity.i2_s", "tq1_0", "tq2_0", "tl1", "tl2", "mxfp4", "nvfp4"):
        yield BITNET, "gguf", {"codec": codec, "tile": (32, 64, 32) if codec in ("tl1", "tl2") else None}
        yield "demo/bitnet", "gguf", {"codec": codec}
    yield LLAMA, "gguf", {"recipe": "q4_k_m", "rules": ["*ffn_down*=q6_k", "output=q8_0"]}
    yield LLAMA, "gguf", {"codec": "q8_0", "shard_bytes": 200_000}
    yield LLAMA, "hf", {"codec": "f16", "shard_bytes": 200_000}
    yield BITNET, "gguf", {"architecture": "bitnet"}
    for bits in (2, 5, 8):
        yield LLAMA, "trellis-v3", {"bits": bits, "effort": "fast"}
    yield LLAMA, "trellis-v3", {"bits": 4, "codebook": "grid"}
    yield LLAMA, "trellis-v3", {"bits": 3, "effort": "fast", "rules": ["*down_proj*=trellis.4"], "shard_bytes": 200_000}
    yield QWEN, "trellis-v3", {"target_bpw": 3.5, "effort": "fast", "calibration": "self"}
    for dialect in ("v0", "v1", "ascendv1"):
        for codec in ("w8a16", "w8a16.g32", "w8a16.asym", "w8a8.dynamic", "w4a16", "w4a16.g32"):
            yield QWEN, "msmodelslim", {"codec": codec, "dialect": dialect}
        yield (
            QWEN,
            "msmodelslim",
            {"codec": "w8a8", "dialect": dialect, "calibration": "self", "smooth": "m4", "kv": "c8"},
        )
        yield QWEN, "msmodelslim", {"codec": "w8a8s", "dialect": dialect, "calibration": "self"}
    yield QWEN, "msmodelslim", {"codec": "w4a8.dynamic", "dialect": "v1"}
    yield QWEN, "msmodelslim", {"codec": "w8a16", "exact_tool": True}
    yield QWEN, "msmodelslim", {"codec": "w8a16", "keep": ["*down_proj*"]}
    yield QWEN, "msmodelslim", {"codec": "w8a16.g32", "calibration": "self", "effort": "max"}
    yield "vectors/trellis/v3_cuda_consolidated", "trellis-v3", {"repair": True}


def digest(*pieces: bytes) -> str:
    """Return a short hash of the pieces."""
    h = hashlib.sha256()
    for piece in pieces:
        h.update(len(piece).to_bytes(8, "little") + piece)
    return h.hexdigest()[:20]


def neutral(text: str) -> str:
    """Remove the paths of this machine."""
    return text.replace(str(ROOT), "")


def converted(source: str, to: str, options: Mapping[str, Any], scratch: Path) -> dict[str, Any]:
    """Return the record of one conversion."""
    target = scratch / ("out.gguf" if to == "gguf" else "out")
    try:
        plan = pq.plan(located(source), to, **options)
        steps = [
            (s.map.origin, s.map.target, s.map.shape, s.action.value, str(s.source), str(s.target), s.nbytes)
            for s in plan.steps
        ]
        words = [
            plan.recipe.name,
            plan.method,
            list(plan.warnings),
            dict(plan.translation.dropped),
            [s.why for s in plan.steps],
        ]
        report = pq.convert(plan, target, threads=1)
    except PolyquantError as e:
        return {"error": type(e).__name__, "message": neutral(str(e))}
    files = sorted(p for p in scratch.rglob("*") if p.is_file())
    errors = [(s.tensor, s.error.rrmse if s.error else None) for s in report.steps]
    return {
        "files": {str(p.relative_to(scratch)): digest(p.read_bytes()) for p in files},
        "steps": digest(repr(steps).encode()),
        "errors": digest(repr(errors).encode()),
        "words": neutral(json.dumps(words)),
    }


def validated(source: str) -> list[str]:
    """Return the finding codes of a source, or the kind of error."""
    try:
        return sorted(f"{f.code} {f.severity.value} {f.tensor}" for f in pq.validate(located(source)))
    except PolyquantError as e:
        return [type(e).__name__]


def record() -> dict[str, Any]:
    """Return the records of all cases, by case name."""
    out: dict[str, Any] = {}
    for source in sources():
        out[f"validate {source}"] = validated(source)
    for source, to, options in cases():
        key = f"{source} -> {to} {json.dumps(options, sort_keys=True)}"
        with tempfile.TemporaryDirectory() as scratch:
            out[key] = converted(source, to, options, Path(scratch))
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return out


def main() -> int:
    """Record or compare; return 0 if nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    now = record()
    written = sum("files" in v for v in now.values() if isinstance(v, dict))
    print(f"{len(now)} cases, {written} of them write files")
    if options.verb == "record":
        options.file.write_text(json.dumps(now, indent=1, sort_keys=True))
        return 0
    before = json.loads(options.file.read_text())
    differing = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    for key in differing:
        old, new = before.get(key), now.get(key)
        print(key)
        if isinstance(old, dict) and isinstance(new, dict):
            for part in sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k)):
                print(f"  {part}: {str(old.get(part))[:300]}\n  {' ' * len(part)}  {str(new.get(part))[:300]}")
        else:
            print(f"  {str(old)[:300]}\n  {str(new)[:300]}")
    print(f"{len(differing)} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
