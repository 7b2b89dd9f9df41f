"""docs/formats/matrix.md is what its script writes."""

import matrix_page


def test_the_page_is_up_to_date():
    text = matrix_page.TARGET.read_text(encoding="utf-8")
    assert text == matrix_page.page(), "run: PYTHONPATH=src python scripts/matrix_page.py"
