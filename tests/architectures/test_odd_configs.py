"""Any value of config.json or GGUF metadata gives hyper-parameters or a one-line error."""

from __future__ import annotations

import pytest

from architectures.golden_models import NAMES, Golden
from polyquant.architectures.find import of_config
from polyquant.errors import PolyquantError

KNOWN = [n for n in NAMES if of_config(Golden(n).config) is not None]
ODD = (
    None,
    "",
    "x",
    "3",
    -1,
    0,
    1,
    2.5,
    1e300,
    float("nan"),
    True,
    False,
    [],
    [1, "a"],
    [[]],
    {},
    {"a": None},
    {"5": {"head_dim": []}},
)


@pytest.mark.parametrize("name", KNOWN)
def test_mutated_config_gives_a_model_or_an_error(name):
    config = Golden(name).config
    record = of_config(config)
    inside = [(k, j) for k, v in config.items() if isinstance(v, dict) for j in v]
    places = [(k,) for k in config] + inside
    for place in places:
        for value in (*ODD, ...):  # ...: the key is absent
            said = dict(config)
            if len(place) == 2:
                said[place[0]] = {k: v for k, v in {**said[place[0]], place[1]: value}.items() if v is not ...}
            else:
                said = {k: v for k, v in {**said, place[0]: value}.items() if v is not ...}
            try:
                hyper = record.hyper.read_config(said, vocab=7)
                record.hyper.to_metadata(hyper)
                record.hyper.to_config(hyper)
            except PolyquantError as e:
                assert "\n" not in str(e)
            except Exception as e:
                raise AssertionError((place, value)) from e


@pytest.mark.parametrize("name", KNOWN)
def test_mutated_metadata_gives_a_model_or_an_error(name):
    golden = Golden(name)
    record = of_config(golden.config)
    metadata = {key: value for key, (_, value) in golden.said["metadata"].items()}
    for key in metadata:
        for value in (*ODD, ...):
            said = {k: v for k, v in {**metadata, key: value}.items() if v is not ...}
            try:
                record.hyper.to_config(record.hyper.read_metadata(said, record.name, vocab=7, tied=True))
            except PolyquantError as e:
                assert "\n" not in str(e)
            except Exception as e:
                raise AssertionError((key, value)) from e
