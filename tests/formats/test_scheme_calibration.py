"""Hub schemes with a calibration text: closer to the float model than rounding; scaling leaves the model as it is."""

import numpy as np
import pytest

import polyquant
from architectures.golden_models import Golden
from golden import VECTORS
from polyquant.calibration.hessians import UNREACHED
from polyquant.errors import PlanError
from polyquant.runtime.load import load

MODEL = VECTORS / "models" / "tiny-llama-untied" / "hf"
CODEC = "compressed.p4.g64.zpp"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. 0123456789, and so on; what else?\n" * 60)
    return path


def windows(model, count, length, seed=0):
    """Random token ids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model.vocab, length) for _ in range(count)]


def divergence(folder, text):
    """KL divergence from the float model on the text, nats."""
    found = polyquant.evaluate(folder, text=text, against=MODEL, context=128, tokens=512, activations="float")
    return found.divergence.kl.value


def test_calibrated_codes_are_closer(text, tmp_path):
    plain, fitted, scaled = (tmp_path / name for name in ("plain", "fitted", "scaled"))
    polyquant.quantize(MODEL, plain, to="compressed-tensors", codec=CODEC)
    polyquant.quantize(MODEL, fitted, to="compressed-tensors", codec=CODEC, calibration=str(text))
    report = polyquant.quantize(
        MODEL, scaled, to="compressed-tensors", codec=CODEC, calibration=str(text), effort="max"
    )
    rounded = divergence(plain, text)
    assert divergence(fitted, text) < rounded
    assert divergence(scaled, text) < rounded
    actions = {s.tensor: s.action for s in report.steps}
    assert actions["model.layers.0.input_layernorm.weight"] == "transcode"
    assert actions["model.norm.weight"] == "copy"


@pytest.mark.parametrize("effort", ["default", "max"])
def test_each_expert_has_its_own_inputs(effort, tmp_path):
    """The error of the outputs falls; experts that no token reaches are rounded, and the report names them."""
    golden = Golden("qwen3_moe")
    model = load(golden.folder, activations="float")
    tokens = windows(model, 1, 200, seed=9)[0]
    exact = model.logits(tokens)
    many, few = tmp_path / "many.json", tmp_path / "few.json"
    many.write_text(str([w.tolist() for w in windows(model, 32, 64)]))
    few.write_text(str([[7] * 70]))
    errors, unseen = {}, {}
    for how, given in {"plain": {}, "many": {"calibration": many}, "few": {"calibration": few}}.items():
        given |= {"effort": effort} if given else {}
        report = polyquant.quantize(
            golden.folder, tmp_path / how, to="compressed-tensors", codec="compressed.p4.g32", **given
        )
        errors[how] = np.square(load(tmp_path / how, activations="float").logits(tokens) - exact).mean()
        unseen[how] = [s.tensor for s in report.steps if UNREACHED in s.note]
    assert errors["many"] < 0.9 * errors["plain"], errors
    assert unseen["plain"] == unseen["many"] == []
    assert unseen["few"]
    assert all(".experts." in name for name in unseen["few"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibration": "TEXT", "codec": "bf16"}, "has no effect"),
        ({"effort": "max", "codec": CODEC}, "needs calibration"),
        ({"effort": "huge", "codec": CODEC}, "unknown effort"),
    ],
)
def test_options_that_do_not_fit(options, message, text, tmp_path):
    options = {k: str(text) if v == "TEXT" else v for k, v in options.items()}
    with pytest.raises(PlanError, match=message):
        polyquant.plan(MODEL, "hf", **options)
