"""polyquant demo"""

from __future__ import annotations

import sys
from pathlib import Path
from shutil import which

import click

from polyquant.analysis.demo import LADDER, demo_model
from polyquant.analysis.demo import demo as run
from polyquant.analysis.inspect import inspect as look
from polyquant.cli.console import decibel, size, table
from polyquant.cli.slow_engine import note_slow_engine
from polyquant.cli.terminal import say, styled


@click.command(epilog="Example:  polyquant demo --out demo-out")
@click.option(
    "--out",
    "folder",
    type=click.Path(file_okay=False),
    default="demo-out",
    show_default=True,
    help="Output folder for the converted files.",
)
def demo(folder: str) -> None:
    """Inspect two embedded models, convert them to eleven formats, validate and compare each."""
    for name, what in (("llama", "a Llama, bfloat16"), ("bitnet", "a BitNet b1.58, packed ternary")):
        model = look(demo_model(name))
        shown = f"{model.weights:,} weights, {size(model.nbytes)}, {model.bpw:.2f} bits per weight"
        say(styled(f"{name:7}", bold=True), f" {what}: {shown}")
    note_slow_engine()
    say()
    say("Each file below is written, validated against its source, and compared with it:")
    say()
    t = table("model", "format", ">bytes", ">bits/weight", ">SNR dB", ">rel. RMSE", "findings")
    bad = 0
    for o in run(Path(folder)):
        codes = f", codes {o.equal_codes:.0%} equal" if o.equal_codes is not None else ""
        say(f"  {o.path}  {o.seconds:.2f} s{codes}")
        t.add_row(
            o.model,
            f"GGUF {o.recipe}",
            f"{o.nbytes:,}",
            f"{o.bpw:.2f}",
            decibel(o.error.snr),
            f"{o.error.rrmse:.4f}",
            str(o.findings or "none"),
        )
        bad += o.findings
    say()
    t.show()
    last = f"{folder}/demo-llama-{LADDER[4][1]}.gguf"
    say()
    say("Next steps:")
    program = _program()
    for arguments in (
        f"run {last} -p 'And it came to pass' -n 40",
        f"inspect {last}",
        f"compare {demo_model('llama')} {last} --sort error",
        f"edit {last} --set general.name='my model' --output copy.gguf",
        "quantize YOUR-HF-FOLDER/ model.gguf --recipe q4_k_m --dry-run",
    ):
        say(f"  {program} {arguments}")
    if bad:
        sys.exit(1)


def _program() -> str:
    """The command to type: `polyquant` if it is on PATH, else the path of this program (a virtual environment)."""
    path = Path(sys.argv[0])
    return "polyquant" if which("polyquant") or path.name != "polyquant" else str(path)
