"""Targets that --overwrite may replace: models, and folders with only model files."""

import os
import shutil

import numpy as np
import pytest

import polyquant as pq
from cli.bad_inputs import GGUF, SOUND
from golden import VECTORS
from polyquant.errors import InputError, PlanError
from polyquant.formats.existing import refuse_target, replaceable
from polyquant.storage.work_folder import WorkFolder

MODELS = ["models/tiny-llama-untied/hf", "bitnet_gguf/hf_packed_bitlinear", "msmodelslim/v0/fp16/w8a8_m4_fallback"]


def names(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("name", MODELS)
def test_every_file_of_a_genuine_model_may_be_replaced(name, tmp_path):
    folder = shutil.copytree(
        VECTORS / name,
        tmp_path / "m",
        ignore=shutil.ignore_patterns("*.npz", "*.md", "calib*", "*.py", "tool_*", "*.txt", "run.json"),
    )
    assert sorted(replaceable(folder)) == names(folder)


@pytest.mark.parametrize(
    "to, codec", [("hf", None), ("trellis-v3", "trellis.3.mul1.12"), ("msmodelslim", "w8a16"), ("gguf", None)]
)
def test_our_output_may_be_replaced(to, codec, tmp_path):
    for _ in range(2):
        pq.convert(SOUND, tmp_path / "out", to=to, codec=codec, overwrite=True)
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(
    "extra",
    [
        "notes.txt",
        "README.md",
        ".git/config",
        "lora.safetensors",
        "sub/model.safetensors",
        "empty/",
        "a/b/c",
        "évil\n\x1b.txt",
    ],
)
def test_a_folder_that_holds_more_than_a_model_is_refused(extra, tmp_path):
    folder = shutil.copytree(SOUND, tmp_path / "m")
    path = folder / extra
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if extra.endswith("/") else path.write_text("precious")
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    with pytest.raises(PlanError, match="not part of a model") as caught:
        pq.convert(GGUF, folder, to="hf", overwrite=True)
    assert str(caught.value).isprintable()
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_a_folder_with_links_is_refused(tmp_path):
    folder = shutil.copytree(SOUND, tmp_path / "m")
    (folder / "tokenizer.json").unlink(missing_ok=True)
    (folder / "tokenizer.json").symlink_to(SOUND / "tokenizer.json")
    with pytest.raises(PlanError, match=r"tokenizer\.json"):
        replaceable(folder)


def test_an_index_cannot_claim_foreign_files(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "notes.txt"}}')
    (folder / "notes.txt").write_text("precious")
    with pytest.raises(PlanError, match=r"notes\.txt"):
        replaceable(folder)


def test_only_empty_folders_and_models_may_be_replaced(tmp_path):
    (tmp_path / "text.gguf").write_text("precious")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/file").write_text("precious")
    (tmp_path / "link").symlink_to(GGUF)
    for name in ("text.gguf", "home", "link"):
        with pytest.raises(PlanError, match="not overwritten"):
            replaceable(tmp_path / name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.gguf").touch()
    assert replaceable(tmp_path / "empty") == replaceable(tmp_path / "empty.gguf") == replaceable(GGUF) == ()
    pq.convert(SOUND, tmp_path / "empty", to="hf", overwrite=True)
    pq.convert(SOUND, tmp_path / "empty.gguf", overwrite=True)


def test_a_broken_model_may_be_replaced(tmp_path):
    folder = shutil.copytree(SOUND, tmp_path / "m")
    os.truncate(folder / "model.safetensors", 100)
    (folder / "config.json").write_text("{")
    assert "model.safetensors" in replaceable(folder)


def test_refused_targets(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    taken = tmp_path / "taken"
    taken.write_bytes(b"GGUF precious")
    for dst in (source, source / "inside", tmp_path, taken, tmp_path / "no" / "folder"):
        with pytest.raises(PlanError):
            refuse_target(dst, source, overwrite=False)
    refuse_target(taken, source, overwrite=True)
    link = tmp_path / "link"
    link.symlink_to(source)
    with pytest.raises(PlanError):
        refuse_target(link / "x", source, overwrite=True)


@pytest.mark.parametrize("name", [".out.partial", ".out.replaced"])
def test_a_source_is_never_replaced(name, tmp_path):
    source = shutil.copytree(SOUND, tmp_path / name)
    before = {p.name: p.read_bytes() for p in source.iterdir()}
    for _ in range(2):
        pq.convert(source, tmp_path / "out", to="hf", overwrite=True)
    assert {p.name: p.read_bytes() for p in source.iterdir()} == before


def test_unfinished_output_is_not_a_source(tmp_path):
    work = WorkFolder.create(tmp_path / "m.gguf", "job", ["m.gguf"])
    shutil.copy(GGUF, work.files / "m.gguf")
    work.close()
    with pytest.raises(PlanError, match="unfinished output"):
        pq.convert(work.files / "m.gguf", tmp_path / "hf", to="hf")


@pytest.mark.parametrize("how", ["in place", "replaced", "in place, same mtime", "another file of it"])
def test_a_source_that_changes_during_the_conversion(how, tmp_path):
    source = shutil.copytree(SOUND, tmp_path / "in")
    name = "config.json" if how == "another file of it" else "model.safetensors"
    made = pq.plan(source, "gguf")
    path = source / name
    status, raw = path.stat(), bytearray(path.read_bytes())
    raw[-3] ^= 32

    def change(_: object) -> None:
        if path.read_bytes() == raw:
            return
        if how == "replaced":
            (tmp_path / "new").write_bytes(raw)
            (tmp_path / "new").replace(path)
        else:
            with path.open("r+b") as file:
                file.write(raw)
        if how == "in place, same mtime":
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    with pytest.raises(InputError, match="changed while it was read"):
        pq.convert(made, tmp_path / "m.gguf", on_progress=change)
    assert names(tmp_path) == ["in"]


def test_a_member_of_a_split_source_that_changes_during_the_conversion(tmp_path):
    pq.convert(SOUND, tmp_path / "m.gguf", shard_bytes=50_000)
    first, *_, last = sorted(tmp_path.glob("m-*.gguf"))
    made = pq.plan(first, "hf")
    os.utime(last)
    with pytest.raises(InputError, match="changed while it was read"):
        pq.convert(made, tmp_path / "hf")


def test_weights_outlive_their_checkpoint():
    assert np.isfinite(pq.open(GGUF)["output_norm.weight"].dequantize()).all()
