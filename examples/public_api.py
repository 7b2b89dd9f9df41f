"""Use every public name of polyquant, on a small demo model.

`make lint` checks this script with mypy --strict, and the tests run it.

python examples/public_api.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import polyquant as pq


def show(progress: pq.Progress) -> None:
    """Report the progress of long work."""
    print(f"\r{progress.done / max(1, progress.total):.0%} {progress.tensor}", end="", file=sys.stderr)


def look(model: Path) -> None:
    """Open, inspect and validate a model."""
    checkpoint: pq.Checkpoint = pq.open(model)
    weight: pq.Weight = checkpoint["blk.0.attn_q.weight"]
    floats: NDArray[np.float32] = np.asarray(weight)
    assert floats.shape == weight.shape
    found: pq.Weight | None = checkpoint.get("no such tensor")
    assert found is None
    try:
        checkpoint["model.layers.0.self_attn.q_proj.weight"]
    except KeyError as problem:
        print(problem)
    inspection: pq.Inspection = pq.inspect(model, tensors="blk.0.*")
    print(checkpoint, weight, inspection, sep="\n")
    findings: pq.Findings = pq.validate(model)
    first: pq.Finding | None = findings[0] if findings else None
    for finding in findings:
        severity: pq.Severity = finding.severity
        print(finding is first, finding, severity.value, pq.explain(finding.code)[:60])


def codes() -> None:
    """Quantize an array and decode it again, without a file."""
    codec: pq.Codec = pq.codec("q8_0")
    values = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    parts = codec.pack(codec.quantize(values))
    assert np.abs(codec.dequantize(parts, values.shape) - values).max() < 0.01
    try:
        codec.quantize(np.full((2, 32), np.nan, np.float32))
    except pq.CodecError as problem:
        print(problem)


def convert(model: Path, folder: Path) -> Path:
    """Plan, convert, compare; gives the small model."""
    rule = pq.Rule("token_embd.weight", "q8_0")
    plan: pq.Plan = pq.plan(model, "gguf", codec="q4_0", rules=[rule, "output.weight=f16"])
    report: pq.Report = pq.convert(plan, folder / "small.gguf", on_progress=show, threads=2)
    print(plan, report, report.error.snr, sep="\n")
    pq.quantize(model, folder / "mix.gguf", recipe="q5_k_m", overwrite=True)
    for part in ("1/2", "2/2"):  # each on any machine
        pq.convert(model, folder / "parts.gguf", codec="q8_0", part=part)
    merged: pq.Report = pq.merge(folder / "parts.gguf", verify=True)
    assert merged.nbytes == (folder / "parts.gguf").stat().st_size
    comparison: pq.Comparison = pq.compare(model, folder / "small.gguf")
    sums: pq.Checksums = pq.checksum(folder / "small.gguf", on_progress=show)
    sums.write()
    assert not [f for f in pq.validate(folder / "small.gguf") if f.code.startswith("SUM")]
    print(sums, sums.content, sums.sha256())
    certificate: pq.Certificate = pq.certify(model, folder / "small.gguf", logits=False)
    assert certificate.certified, certificate.failures
    certificate.write(folder / "certificate.json")
    print(comparison, certificate, sep="\n")
    results: list[pq.Tabular] = [plan, report, comparison, sums, certificate]
    for result in results:  # pandas.DataFrame(result.rows())
        rows: list[pq.Row] = result.rows()
        assert rows[0]["tensor"]
    return folder / "small.gguf"


def run(model: Path, folder: Path) -> None:
    """Generate text, measure perplexity and an importance matrix."""
    text = folder / "text.txt"
    text.write_text("And it came to pass at the end of two full years, that Pharaoh dreamed. " * 40, encoding="utf-8")
    loaded: pq.Model = pq.load(model, activations="float")
    generation: pq.Generation = loaded.generate("And it came", max_tokens=4)
    tokens: list[pq.Token] = list(generation)
    print(loaded, "".join(token.text for token in tokens))
    answers: list[pq.Answer] = list(loaded.generate_batch(["And it came", "Pharaoh"], max_tokens=4))
    print(*(answer.text for answer in answers))
    evaluation: pq.Evaluation = pq.evaluate(model, text=text, context=32, tokens=256)
    importance: pq.Importance = pq.importance(model, folder / "imatrix.gguf", calibration=text, windows=1)
    print(evaluation, importance, sep="\n")


def choose(model: Path, folder: Path) -> None:
    """Measure two quantizations and choose one."""
    found: pq.Sweep = pq.sweep(
        model, text=folder / "text.txt", work=folder / "sweep", recipes=["q8_0"], context=32, tokens=64, requantize=True
    )
    print(found, found.advice.sentence, found.recommended, found.rows()[1]["kl"], sep="\n")


def picture(model: Path, folder: Path) -> None:
    """Put two models side by side: a table, figures, a page."""
    page: pq.ReportPage = pq.report(folder / "small.gguf", against=model)
    figure: pq.Figure = page.figure("error_map")
    print(page, figure, [row["efficient"] for row in page.rows()])
    (folder / "errors.svg").write_text(figure.svg(), encoding="utf-8")
    page.save(folder / "report.html")


def change(model: Path, folder: Path) -> None:
    """Edit metadata of a copy; write an msModelSlim folder and repair it."""
    name = pq.Meta(pq.Kind.STRING, "demo")
    edited: pq.Edited = pq.edit(model, folder / "named.gguf", set={"general.name": name})
    pq.convert(model, folder / "w8a16", to="msmodelslim", codec="w8a16")
    repaired: pq.Repaired = pq.repair(folder / "w8a16", folder / "repaired", dialect="ascendv1")
    print(edited, repaired, sep="\n")


def pack(model: Path, folder: Path) -> None:
    """Pack a model into both kinds of store, and open it there."""
    small = folder / "small.gguf"
    packed: pq.Packed = pq.pack(small, ollama=folder / "store", name="demo:q4", host="registry.example")
    again: pq.Packed = pq.pack(model, oci=folder / "layout", name="demo", on_progress=show)
    models: list[pq.Stored] = pq.stored(ollama=folder / "store")
    assert len(pq.open(packed.path)) == len(pq.open(small)) and pq.open(again.reference)
    print(packed, again, *(stored.name for stored in models), sep="\n")


def save(folder: Path) -> None:
    """Write arrays to files."""
    rng = np.random.default_rng(0)
    arrays = {"a": rng.standard_normal((64, 256)).astype(np.float32), "b": np.arange(4, dtype=ml_dtypes.bfloat16)}
    pq.save(arrays, folder / "own.gguf", codec={"a": "q4_k"}, metadata={"general.name": "own"})
    weights = pq.open(folder / "own.gguf")
    report: pq.Report = pq.save({"copy": weights["a"], "more": arrays["b"]}, folder / "more.gguf")
    print(report)


def lists() -> None:
    """Print versions and engines."""
    codecs: list[pq.CodecInfo] = pq.codecs()
    recipes: list[pq.RecipeInfo] = pq.recipes()
    formats: list[pq.FormatInfo] = pq.formats()
    print(len(codecs), len(recipes), len(formats), pq.codecs()["q4_k"].written_by)
    checks: list[pq.Check] = pq.doctor()
    print(pq.__version__, checks[0].value)


def errors(folder: Path) -> None:
    """Catch what polyquant raises."""
    for call in (
        lambda: pq.open(folder / "missing"),
        lambda: pq.codec("q4k"),
        lambda: pq.codec("gptq.4.g128").quantize(np.zeros((8, 128), np.float32)),
    ):
        try:
            call()
        except (pq.InputError, pq.PlanError, pq.RemoteError, pq.UnknownNameError, pq.UnsupportedError) as problem:
            assert isinstance(problem, pq.PolyquantError)
            print(problem)


def main(folder: Path) -> None:
    """Run everything in `folder`."""
    outcome: pq.Outcome = next(pq.demo(folder))
    assert (pq.demo_model("llama") / "config.json").is_file()
    look(outcome.path)
    codes()
    small = convert(outcome.path, folder)
    run(small, folder)
    choose(outcome.path, folder)
    picture(outcome.path, folder)
    change(outcome.path, folder)
    pack(outcome.path, folder)
    save(folder)
    lists()
    errors(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
