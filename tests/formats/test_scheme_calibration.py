"""Hub schemes with a calibration text: closer to the float model than rounding; scaling leaves the model as it is."""

import pytest

import polyquant
from golden import VECTORS
from polyquant.errors import PlanError

MODEL = VECTORS / "models" / "tiny-llama-untied" / "hf"
CODEC = "compressed.p4.g64.zpp"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. 0123456789, and so on; what else?\n" * 60)
    return path


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
