"""Calibration samples from .json and .jsonl."""

import numpy as np
import pytest

from golden import VECTORS
from polyquant.calibration.samples import read_samples
from polyquant.calibration.stages import calibration_windows
from polyquant.errors import InputError
from polyquant.runtime.load import load

QWEN2 = VECTORS / "msmodelslim/models/qwen2_fp16"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "[[1, 2]]", None),
        ("a.json", "[[1, 2], [3]]", [(1, 2), (3,)]),
        ("a.JSON", '{"input_ids": [[5]], "attention_mask": [[1]]}', [(5,)]),
        ("a.jsonl", '[1, 2]\n\n{"input_ids": [3]}\n{"text": "word"}\n{"inputs_pretokenized": "two words"}',
            [(1, 2), (3,), "word", "two words"]),
    ],
)  # fmt: skip
def test_accepted_forms(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_text(content)
    assert read_samples(path) == expected


@pytest.mark.parametrize("content", ['{"ids": [[1]]}', "[1, 2]", "[[-1]]", "[[1.5]]", "[[true]]", "3", "[{}]", "[[1"])
def test_invalid_samples(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"a\.json"):
        read_samples(path)


def test_samples_are_windows(tmp_path):
    model = load(QWEN2, activations="float")
    windows = calibration_windows(model, QWEN2 / "calib_ids.json", windows=5, tokens=30)
    assert [len(w) for w in windows] == [24, 30, 17, 30, 29]
    (tmp_path / "few.json").write_text("[[1, 2]]")
    with pytest.raises(InputError, match="too little text"):
        calibration_windows(model, tmp_path / "few.json")
    (tmp_path / "far.json").write_text(str([[135] * 70, [136]]))
    with pytest.raises(InputError, match=r"outside the vocabulary.*found 136"):
        calibration_windows(model, tmp_path / "far.json")
    assert np.concatenate(windows).max() < model.vocab
