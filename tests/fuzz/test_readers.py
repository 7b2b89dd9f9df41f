import pytest

from fuzz.readers import attempt, make, read_everything, subjects

SHORT, LONG = 400, 10_000


@pytest.mark.parametrize("first", range(0, SHORT, 100))
def test_mutated_input(first):
    opened = sum(attempt(seed) for seed in range(first, first + 100))
    assert 0 < opened < 100  # some get through to the tensors, some do not


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 10_000 + LONG, 500))
def test_mutated_input_for_longer(first):
    for seed in range(first, first + 500):
        attempt(seed)


def test_a_seed_gives_the_same_input_every_time(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for seed in range(5):
        one, two = make(seed, tmp_path / "a"), make(seed, tmp_path / "b")
        for path in [one, *one.glob("*")]:
            if path.is_file():
                assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()
        for folder in (tmp_path / "a/model", tmp_path / "b/model"):
            if folder.exists():
                for path in folder.iterdir():
                    path.unlink()
                folder.rmdir()
        assert one.name == two.name


@pytest.mark.parametrize("subject", subjects(), ids=lambda p: p.name)
def test_unmutated_inputs_are_readable(subject):
    refused_by_design = ("expanded.bin", "old.bin")
    assert read_everything(subject) == (subject.name not in refused_by_design)
