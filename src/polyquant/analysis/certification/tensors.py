"""Check every tensor: scan it, recognize equivalent forms, and explain the differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from polyquant.analysis.certification import static
from polyquant.analysis.certification.bounds import Bounds
from polyquant.analysis.certification.cause import Cause
from polyquant.analysis.certification.matrices import counterpart, explain_matrix, layer_of
from polyquant.analysis.certification.scan import Scan, scan
from polyquant.analysis.certification.sides import Pair, architecture_of, hyper_of, pair_up
from polyquant.analysis.certification.smoothing import smoothed
from polyquant.analysis.certification.static import kept_by_tools
from polyquant.analysis.certification.vectors import explain_vector
from polyquant.analysis.side import Side
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.record import Architecture
from polyquant.capabilities import Opaque
from polyquant.errors import PolyquantError
from polyquant.formats.steps import Progress
from polyquant.types import Checkpoint, Finding, Findings, Severity, as_matrix

__all__ = ["TensorCheck", "TensorResult", "check_tensors"]

_THREADS = 2
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True, slots=True)
class TensorResult:
    """One tensor of the certificate.

    verdict: "equal", "within" the codec's bound, "equivalent" (up to smoothing, or a tied head), "differs", "missing",
    "extra", "skipped". error: relative RMS; worst, bound: the largest and the allowed relative error of a unit.
    """

    name: str
    shape: tuple[int, ...]
    source: str
    target: str
    verdict: str
    error: float | None = None
    worst: float | None = None
    bound: float | None = None


@dataclass(slots=True)
class TensorCheck:
    """Results by tensor, and findings. translated: tensors were compared under GGUF's names."""

    results: dict[str, TensorResult] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)
    translated: bool = False

    def add(self, code: str, message: str, tensor: str | None, severity: Severity = Severity.ERROR) -> None:
        """Add a finding."""
        self.findings.append(Finding(code, severity, message, tensor))

    def accept(self, tensors: Iterable[str]) -> None:
        """Withdraw the findings about extra tensors that smoothing explains."""
        names = set(tensors)
        self.findings = Findings(f for f in self.findings if f.tensor not in names or f.code != "CER002")

    @property
    def typical_error(self) -> float:
        """Relative RMS error of the worst matrix that is not wrong."""
        return max((r.error or 0.0 for r in self.results.values() if r.error and math.isfinite(r.error)), default=0.0)


def check_tensors(
    source: Checkpoint, target: Checkpoint, on_progress: Callable[[Progress], None] | None = None
) -> TensorCheck:
    """Compare all tensors. Raises PolyquantError if a checkpoint cannot be translated."""
    bounds = Bounds()
    pair = pair_up(source, target)
    check, scans = _scanned(pair, bounds, on_progress)
    record, hyper = _known(source, target)
    wrong = {n for n, s in scans.items() if not s.sound}
    if record is not None and wrong and not pair.translated and source.naming != "gguf":
        try:  # under GGUF's names, smoothing and fused tensors can be recognized
            pair = pair_up(source, target, translate_both=True)
        except PolyquantError:
            pass
        else:
            check, scans = _scanned(pair, bounds, None)
            wrong = {n for n, s in scans.items() if not s.sound}
    _heads(pair, check, bounds)
    if wrong and record is not None and hyper is not None:
        pair = _smoothed(
            {n: scans[n] for n in wrong}, pair, check, scans, lambda e, a: scan(e, a, bounds), record, hyper
        )
    _explain({n: s for n, s in scans.items() if not s.sound}, pair, check, hyper)
    for name, problem in static.contradictions(target):
        check.add("CER027", problem, name)
    return check


def _smoothed(
    wrong: Mapping[str, Scan],
    pair: Pair,
    check: TensorCheck,
    scans: dict[str, Scan],
    rescan: Callable[[Side, Side], Scan],
    record: Architecture,
    hyper: Hyper,
) -> Pair:
    """Recognize smoothing: the pair with the factors. Replaces the scans and results of the tensors it changes."""
    sides: dict[str, Side] = {}
    for product in smoothed(wrong, pair.expected, pair.actual, record, hyper, rescan):
        readers = f"{len(product.readers)} matrices" if len(product.readers) > 1 else product.readers[0]
        check.add("CER060", f"smoothed together with {readers}", product.feeder, Severity.NOTE)
        check.accept(product.scans)
        sides |= product.sides
        for name, found in product.scans.items():
            scans[name] = found
            check.results[name] = _result(name, pair, found, "equivalent" if found.sound else "differs")
    return replace(pair, expected={**pair.expected, **sides})


def _known(source: Checkpoint, target: Checkpoint) -> tuple[Architecture | None, Hyper | None]:
    for checkpoint in (source, target):
        record = architecture_of(checkpoint)
        hyper = hyper_of(checkpoint, record) if record is not None else None
        if hyper is not None:
            return record, hyper
    return None, None


def _scanned(
    pair: Pair, bounds: Bounds, on_progress: Callable[[Progress], None] | None
) -> tuple[TensorCheck, dict[str, Scan]]:
    """Scan all common tensors; findings for those that only one side has."""
    check, scans = TensorCheck(translated=pair.translated), dict[str, Scan]()
    common = [n for n in pair.expected if n in pair.actual and _comparable(n, pair, check)]
    for side, code, what in ((pair.expected, "CER001", "missing"), (pair.actual, "CER002", "extra")):
        for name in side:
            if name not in pair.expected or name not in pair.actual:
                _alone(name, side[name], code, what, pair, check)
    total = sum(math.prod(pair.expected[n].shape) for n in common)
    done = 0
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, found in zip(
            common, pool.map(lambda n: scan(pair.expected[n], pair.actual[n], bounds), common), strict=True
        ):
            scans[name] = found
            verdict = "differs" if not found.sound else "equal" if found.equal else "within"
            check.results[name] = _result(name, pair, found, verdict)
            done += math.prod(pair.expected[name].shape)
            if on_progress is not None:
                on_progress(Progress(done, total, name, 0.0))
    return check, scans


def _result(name: str, pair: Pair, found: Scan, verdict: str) -> TensorResult:
    e, a = pair.expected.get(name), pair.actual[name]
    return TensorResult(
        name, a.shape, "" if e is None else e.codec, a.codec, verdict, found.error, found.worst, found.bound.unit
    )


def _comparable(name: str, pair: Pair, check: TensorCheck) -> bool:
    """False, with a finding, for tensors whose values cannot be compared."""
    e, a = pair.expected[name], pair.actual[name]
    problem = None
    for side in (e, a):
        if any(isinstance(w.codec, Opaque) for w in side.weights):
            problem = "CER005", f"its type {side.codec} cannot be decoded"
    if problem is None and e.shape != a.shape and _squeezed(e.shape) != _squeezed(a.shape):
        problem = "CER003", f"the shape is {list(a.shape)}, expected {list(e.shape)}"
    if problem is not None:
        check.add(*problem, name)
        check.results[name] = TensorResult(name, e.shape, e.codec, a.codec, "differs")
    return problem is None and as_matrix(e.shape) == as_matrix(a.shape)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def _alone(name: str, side: Side, code: str, what: str, pair: Pair, check: TensorCheck) -> None:
    """A tensor that one side has: a finding, unless runtimes do not need it."""
    result = TensorResult(name, side.shape, *((side.codec, "") if what == "missing" else ("", side.codec)), what)
    check.results[name] = result
    reason = pair.dropped.get(name)
    if reason is not None:
        check.results[name] = TensorResult(name, side.shape, result.source, result.target, "skipped")
        check.add("CER061", f"{what}: {reason}", name, Severity.NOTE)
    elif what == "extra" and (kept := kept_by_tools(name, pair.actual)) is not None:
        check.results[name] = TensorResult(name, side.shape, "", result.target, "skipped")
        check.add("CER061", kept, name, Severity.NOTE)
    elif not (name == _HEAD and _EMBEDDING in pair.expected and _EMBEDDING in pair.actual):
        here = "in the target" if what == "missing" else "not in the source"
        check.add(code, f"{what} {here}" if what == "missing" else here, name)


def _heads(pair: Pair, check: TensorCheck, bounds: Bounds) -> None:
    """A head that one side stores and the other ties to the embedding."""
    if (_HEAD in pair.expected) == (_HEAD in pair.actual) or not {
        _EMBEDDING
    } <= pair.expected.keys() & pair.actual.keys():
        return
    separate = _HEAD in pair.expected
    e = pair.expected[_HEAD if separate else _EMBEDDING]
    a = pair.actual[_EMBEDDING if separate else _HEAD]
    found = scan(e, a, bounds) if e.shape == a.shape else None
    sound = found is not None and found.sound
    verdict = "equivalent" if sound else "missing" if separate else "differs"
    check.results[_HEAD] = TensorResult(
        _HEAD, e.shape, e.codec, a.codec, verdict, *((found.error, found.worst, found.bound.unit) if found else ())
    )
    if sound:
        what = "the target uses the embedding, which is equal" if separate else "stored in addition to the embedding"
        check.add("CER061", f"tied: {what}", _HEAD, Severity.NOTE)
    elif separate:
        check.add("CER028", "the source has a separate head, the target uses the embedding", _HEAD)
    else:
        check.add("CER028", "the source uses the embedding, the target has a head with other values", _HEAD)


# ---------------------------------------------------------------- explanations


def _explain(wrong: Mapping[str, Scan], pair: Pair, check: TensorCheck, hyper: Hyper | None) -> None:
    """Add a finding for each wrong tensor; exchanged tensors and layers get one together."""
    causes = {name: _cause(name, pair, found, hyper) for name, found in wrong.items()}
    holds = {name: cause.holds for name, cause in causes.items() if cause.holds}
    done = _layers(holds, causes, check)
    for name, cause in causes.items():
        if name in done:
            continue
        other = cause.holds
        code = "CER013" if other and counterpart(name, other) else cause.code
        mutual = other in causes and causes[other].holds == name
        if mutual:
            done.add(other)
        check.add(code, f"exchanged with {other}" if mutual else cause.message, name)


def _cause(name: str, pair: Pair, found: Scan, hyper: Hyper | None) -> Cause:
    e, a = pair.expected[name], pair.actual[name]
    others = pair.expected
    if 1 in as_matrix(e.shape):
        same = {n: s for n, s in others.items() if s.shape == e.shape}
        return explain_vector(name, e, a, same, hyper)
    return explain_matrix(name, e, a, found, others, hyper)


def _layers(holds: Mapping[str, str], causes: Mapping[str, Cause], check: TensorCheck) -> set[str]:
    """Findings for layers whose tensors all hold those of one other layer. Returns the tensors that they cover."""
    layers: dict[int, dict[str, int]] = {}
    for name in causes:
        index, stem = layer_of(name)
        held, other = layer_of(holds.get(name, ""))
        layers.setdefault(index, {})[name] = held if stem == other else -1
    moved = {
        index: next(iter(set(found.values())))
        for index, found in layers.items()
        if index >= 0 and len(found) > 1 and len(set(found.values())) == 1 and -1 not in found.values()
    }
    done: set[str] = set()
    for index, held in moved.items():
        names = set(layers[index])
        if not names & done:
            back = moved.get(held) == index
            what = f"layers {index} and {held} are exchanged" if back else f"layer {index} holds layer {held}"
            check.add("CER014", what, min(names))
            done |= names | (set(layers[held]) if back else set())
    return done
