"""Check an installed wheel: run by `make wheel` and cibuildwheel with the Python of an environment that has only it.

    ENVIRONMENT/bin/python -I scripts/check_wheel.py [--pure] [--types]

--pure: the wheel was built without a compiler. --types: mypy is installed, and must find the types of the package.
Exit status 1 and one line per fault.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ("py.typed", "_native.pyi", "codecs/iq_codebooks.bin", "demo/llama/model.safetensors", "demo/held-out.txt")
"""Files that no import needs, and a few that commands read."""
MANUAL = "../../../share/man/man1/polyquant.1"
"""Installed by CMake, so only with native kernels."""
IMPORT_SECONDS = 0.5
TYPED = """\
import polyquant as pq
shape: tuple[int, ...] = pq.open("model.gguf")["output.weight"].shape
wrong: str = pq.open("model.gguf")
"""


def run(*command: str, folder: str) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, without variables that change what Python imports."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "POLYQUANT"))}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def faults(folder: str, *, pure: bool, types: bool) -> Iterator[str]:
    """Yield the faults of the installed package. folder: an empty folder."""
    program = Path(sys.executable).with_name("polyquant")
    distribution = importlib.metadata.distribution("polyquant")
    package = Path(str(distribution.locate_file("polyquant")))
    if ROOT in package.resolve().parents:
        yield f"polyquant is imported from the source tree: {package}"
    yield from (f"{name} is missing" for name in DATA if not (package / name).is_file())
    yield from (f"{name} does not belong into a wheel" for name in strays(distribution))
    if not pure and not distribution.locate_file(MANUAL).is_file():
        yield "the manual page is missing"
    native = [f for f in package.glob("_native.*") if f.suffix == ".so"]
    if bool(native) == pure:
        yield "contains an extension module" if pure else "the extension module is missing: the build failed"
    code = "import sys, time; t = time.perf_counter(); import polyquant; print(time.perf_counter() - t)"
    seconds = min(float(run(sys.executable, "-c", code, folder=folder).stdout or "inf") for _ in range(5))
    if seconds > IMPORT_SECONDS:
        yield f"`import polyquant` takes {seconds:.2f} s, more than {IMPORT_SECONDS} s"
    for arguments, status, shown in (
        (["--version"], 0, f"polyquant {distribution.version}"),
        (["doctor"], int(pure), "numpy" if pure else "native equals numpy"),
        (["demo", "--out", "out"], 0, "GGUF q4_k_m"),
        (["inspect", "out/demo-llama-q4_k_m.gguf", "--format", "json"], 0, '"q4_k"'),
        (["validate", "out/demo-bitnet-i2_s.gguf"], 0, ""),
        (["eval", "out/demo-llama-q4_0.gguf", "--text", str(package / "demo/held-out.txt")], 0, "perplexity"),
    ):
        done = run(str(program), *arguments, folder=folder)
        if done.returncode != status or shown not in done.stdout:
            yield f"polyquant {' '.join(arguments)}: exit {done.returncode}\n{done.stdout[-500:]}{done.stderr[-1500:]}"
    if types:
        yield from untyped(folder)


def strays(distribution: importlib.metadata.Distribution) -> list[str]:
    """Installed files outside the package, its metadata and its program."""
    known = ("polyquant/", f"polyquant-{distribution.version}.dist-info/", "../../../bin/polyquant", MANUAL)
    return [str(f) for f in distribution.files or () if not str(f).startswith(known)]


def untyped(folder: str) -> Iterator[str]:
    """Yield a line unless mypy knows the types of the package: it accepts line 2 of TYPED and rejects line 3."""
    Path(folder, "typed.py").write_text(TYPED, encoding="utf-8")
    done = run(sys.executable, "-m", "mypy", "--strict", "--output", "json", "typed.py", folder=folder)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if [f["line"] for f in found] != [3] or found[0]["code"] != "assignment":
        yield f"mypy does not use the types of the package:\n{done.stdout}{done.stderr}"


def main() -> int:
    """Print the faults; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pure", action="store_true")
    parser.add_argument("--types", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = list(faults(folder, pure=options.pure, types=options.types))
    print(*(lines or ["the installed wheel works"]), sep="\n")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
