"""docs/formats/README.md and its pictures are those of the codecs."""

from pathlib import Path

import pytest

import atlas_page
from polyquant import codec

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_page_is_up_to_date(monkeypatch):
    monkeypatch.setattr(atlas_page, "svg", lambda spec: "drawn")
    page = atlas_page.files()["formats/README.md"]
    assert (DOCS / "formats/README.md").read_text(encoding="utf-8") == page, "run: python scripts/atlas_page.py"


@pytest.mark.slow
def test_pictures_are_up_to_date():
    pytest.importorskip("vl_convert")
    for name, text in atlas_page.files().items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, name


def test_what_bits_do():
    """[d f16][qs 16] of q4_0: two bytes scale 32 weights, every other bit belongs to one."""
    assert atlas_page.bit_classes(codec("q4_0")) == [atlas_page.ALL] * 16 + [atlas_page.ONE] * 128
    assert atlas_page.bit_classes(codec("q4_k"))[32:128] == [atlas_page.GROUP] * 96
    assert atlas_page.bit_classes(codec("nvfp4"))[7] == atlas_page.UNUSED  # the sign of a scale
    assert set(atlas_page.bit_classes(codec("iq2_xxs"))) == {atlas_page.ALL, atlas_page.GROUP, atlas_page.SOME}
