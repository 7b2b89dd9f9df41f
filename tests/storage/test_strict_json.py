import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyquant.errors import InputError
from polyquant.storage import strict_json
from polyquant.storage.strict_json import HEADER, INDEX, OTHER, Limit, parse

REFUSED = {
    "empty": (b"", "not valid JSON"),
    "cut": (b'{"a": [1, 2', "not valid JSON"),
    "two values": (b"{} {}", "not valid JSON"),
    "bare word": (b"{a: 1}", "not valid JSON"),
    "control character": (b'{"a": "\x01"}', "not valid JSON"),
    "byte order mark": (b"\xef\xbb\xbf{}", "not valid JSON"),
    "key twice": (b'{"a": 1, "b": 2, "a": 1}', "key 'a' twice"),
    "key twice inside": (b'[{"x": {"k\\n": 1, "k\\n": 1}}]', r"key 'k\\n' twice"),
    "key twice by escape": (b'{"a": 1, "\\u0061": 1}', "key 'a' twice"),
    "NaN": (b'{"a": NaN}', "not finite"),
    "Infinity": (b"[-Infinity]", "not finite"),
    "1e999": (b"[1e999]", "not finite"),
    "21 digits": (b"[" + b"9" * 21 + b"]", "integer is too long"),
    "a million digits": (b"[" + b"9" * 1_000_000 + b"]", "integer is too long"),
    "depth 65": (b"[" * 65 + b"]" * 65, "nested too deep"),
    "depth a million": (b"[" * 1_000_000, "nested too deep"),
    "objects deep": (b'{"a":' * 70, "nested too deep"),
    "deep after an escaped quote": (b'["\\"", ' + b"[" * 70, "nested too deep"),
    "deep after two backslashes": (b'["\\\\", ' + b"[" * 70, "nested too deep"),
    "invalid UTF-8": (b'["\xff"]', "not UTF-8"),
    "encoded surrogate": (b'["\xed\xa0\x80"]', "not UTF-8"),
    "lone high surrogate": (b'["\\ud800"]', "lone surrogate"),
    "lone low surrogate": (b'{"\\uDC00x": 1}', "lone surrogate"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_json_is_a_one_line_error(name):
    data, why = REFUSED[name]
    start = time.process_time()
    with pytest.raises(InputError, match=why) as e:
        parse(data, HEADER, file="x.json")
    assert time.process_time() - start < 1
    assert "\n" not in str(e.value)
    assert str(e.value).startswith("x.json: ")


@pytest.mark.parametrize(
    "text",
    [
        "{}", "[1, -2.5e3, true, null]", '"[[[["', "[" * 64 + "]" * 64, '{"a": "\\\\", "b": "{\\"{"}',
        '["\\ud83d\\ude00"]', "[18446744073709551615, -9223372036854775808]", '["' + "\\" * 10 + '"]',
    ],
)  # fmt: skip
def test_valid_json_equals_the_json_module(text):
    assert parse(text.encode(), HEADER) == json.loads(text)


def test_model_max_length_of_transformers_is_taken():
    text = b'{"model_max_length": 1000000000000000019884624838656}'
    assert parse(text, OTHER)["model_max_length"] == int(1e30)
    with pytest.raises(InputError, match="integer is too long"):
        parse(text, INDEX)


def test_size_and_values_are_capped_before_parsing():
    with pytest.raises(InputError, match="too large"):
        parse(b"[" + b" " * 100 + b"]", Limit(100, 10))
    with pytest.raises(InputError, match="too many values"):
        parse(b"[1,2,3,4,5,6,7,8,9,10,11]", Limit(100, 10))
    assert parse(b'["1,2,3,4,5,6,7,8,9,10,11,[[[[[["]', Limit(100, 10))


def test_chunk_sizes_do_not_change_the_result(monkeypatch):
    text = b'{"a\\\\": ["\\"[[[", {"b": "x\\\\\\"]"}], "c": [[1], [2, [3]]]}'
    for chunk in range(1, 9):
        monkeypatch.setattr(strict_json, "_CHUNK", chunk)
        assert parse(text, HEADER) == json.loads(text)
        with pytest.raises(InputError, match="nested too deep"):
            parse(text[:-1] + b', "d": ' + b"[" * 64 + b"]" * 64 + b"}", HEADER)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**19), 10**19) | st.floats(allow_nan=False,
        allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(JSON, st.booleans())
@settings(max_examples=100, deadline=None)
def test_round_trip(value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse(text.encode(), HEADER) == json.loads(text)


@given(st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_a_value_or_input_error(data):
    try:
        parse(data, HEADER)
    except InputError as e:
        assert "\n" not in str(e)


def test_a_bool_is_not_an_int():
    assert strict_json.integer(3, "n") == 3
    for wrong in (True, 3.0, "3", None, -1):
        with pytest.raises(InputError):
            strict_json.integer(wrong, "n")
    assert strict_json.typed(True, bool, "flag") is True
    with pytest.raises(InputError, match="expected integer, found bool"):
        strict_json.typed(True, int, "n")
    assert strict_json.integers([1, 2], "shape") == (1, 2)


def test_file_too_large_is_not_read(tmp_path):
    path = tmp_path / "big.json"
    with path.open("wb") as f:
        f.truncate(10**12)
    with pytest.raises(InputError, match="too large"):
        strict_json.read(path)
