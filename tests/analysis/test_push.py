"""push: the card, the files of the model and no others, one commit, nothing overwritten without --overwrite."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import polyquant as pq
from polyquant.analysis.push import prepare_push, push
from polyquant.cli import cli
from polyquant.errors import InputError, PlanError, RemoteError
from polyquant.storage import locations
from remote_server import COMMIT, Server, running

LLAMA = Path(__file__).parents[1] / "vectors" / "models" / "tiny-llama-untied" / "hf"
TARGET = "hf://org/tiny"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    monkeypatch.setenv("HF_TOKEN", "hf_TOPSECRET")
    locations._made.clear()
    with running(Server(new_repos=tmp_path / "hub", git=True)) as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        yield made


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(LLAMA, folder)
    (folder / "notes.txt").write_text("private")
    (folder / ".env").write_text("SECRET=1")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_model_and_its_card_are_one_commit(hub, model):
    made = push(model, TARGET)
    there = content(hub.repos["org/tiny"])
    assert {n: data for n, data in there.items() if n != "README.md"} == {
        n: (model / n).read_bytes() for n in made.files
    }
    assert there["README.md"].decode() == made.card
    assert set(made.skipped) == {"notes.txt", ".env"}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(made.files)
    assert len(hub.commits) == 1
    assert made.url.endswith(f"/org/tiny/commit/{COMMIT}")
    assert pq.open(TARGET).keys() == pq.open(model).keys()


def test_a_second_push_sends_nothing(hub, model):
    push(model, TARGET)
    again = push(model, TARGET)
    assert again.changed == ()
    assert len(hub.commits) == 1


def test_files_that_differ_are_not_overwritten(hub, model):
    push(model, TARGET)
    (model / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | {"x": 1}))
    before = content(hub.repos["org/tiny"])
    with pytest.raises(PlanError, match=r"have other content: README.md, config.json|have other content.*--overwrite"):
        push(model, TARGET)
    assert content(hub.repos["org/tiny"]) == before
    made = push(model, TARGET, overwrite=True)
    assert "config.json" in made.changed
    assert "model.safetensors" not in made.changed
    assert (hub.repos["org/tiny"] / "config.json").read_bytes() == (model / "config.json").read_bytes()


def test_private_is_for_a_new_repository(hub, model):
    push(model, TARGET, private=True)
    assert hub.created[0].get("private") is True or hub.created[0].get("visibility") == "private"


def test_the_card_of_a_quantized_file(tmp_path, capsys):
    made = ["quantize", str(LLAMA), str(tmp_path / "tiny-q8.gguf"), "--codec", "q8_0", "--format", "json"]
    cli.main(made, standalone_mode=False)
    (tmp_path / "report.json").write_text(capsys.readouterr().out)
    made = prepare_push(
        tmp_path / "tiny-q8.gguf", "hf://org/tiny-gguf", base_model="org/tiny", report=tmp_path / "report.json"
    )
    lines = made.card.splitlines()
    assert lines[:3] == ["---", "base_model: org/tiny", "tags:"]
    assert {"- polyquant", "- gguf", "- q8_0"} <= set(lines)
    assert "| quantize | `bf16` | `q8_0` |" in made.card or "| quantize | `f32` | `q8_0` |" in made.card
    assert "llama-cli -hf org/tiny-gguf -hff tiny-q8.gguf" in lines
    assert "polyquant run hf://org/tiny-gguf/tiny-q8.gguf" in lines
    assert "bits per weight" in made.card
    assert list(made.files) == ["tiny-q8.gguf"]
    cli.main(["push", str(tmp_path / "tiny-q8.gguf"), "hf://org/tiny-gguf", "--dry-run"], standalone_mode=False)
    out = capsys.readouterr().out
    assert "README.md" in out
    assert "# tiny-gguf" in out


def test_a_dry_run_sends_nothing(hub, model, capsys):
    cli.main(["push", str(model), TARGET, "--dry-run", "--format", "json"], standalone_mode=False)
    shown = json.loads(capsys.readouterr().out)
    assert shown["changed"] == []
    assert "model.safetensors" in shown["files"]
    assert hub.requests == []


def test_the_command(hub, model, capsys):
    cli.main(["push", str(model), TARGET], standalone_mode=False)
    out = capsys.readouterr().out
    assert "uploaded" in out
    assert "not uploaded: .env, notes.txt" in out


def test_a_folder_of_gguf_files(tmp_path):
    for codec in ("q8_0", "q4_0"):
        pq.quantize(LLAMA, tmp_path / f"tiny-{codec}.gguf", codec=codec)
    made = prepare_push(tmp_path, TARGET)
    assert sorted(made.files) == ["tiny-q4_0.gguf", "tiny-q8_0.gguf"]
    assert "## tiny-q4_0.gguf" in made.card


def test_an_own_card_is_kept(model):
    (model / "README.md").write_text("# mine\n")
    made = prepare_push(model, TARGET)
    assert made.card == "# mine\n"
    assert "README.md" not in made.skipped


@pytest.mark.parametrize("status", ["401", "403", "500"])
def test_a_refusal_is_one_line_without_the_token(hub, model, status, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.fault = lambda request, number: status
    with pytest.raises(RemoteError) as caught:
        push(model, TARGET)
    assert "\n" not in str(caught.value)
    assert "TOPSECRET" not in str(caught.value)


def test_a_commit_in_between_is_refused(hub, model, monkeypatch):
    push(model, TARGET)
    from polyquant.storage.remote.hub import Hub

    original = Hub.files
    monkeypatch.setattr(Hub, "files", lambda self, path: ("f" * 40, original(self, path)[1]))
    with pytest.raises(RemoteError, match="someone else committed meanwhile"):
        push(model, TARGET, base_model="org/base", overwrite=True)


@pytest.mark.parametrize("target", ["folder", "https://host/x", "s3://bucket/x", "hf://org/tiny/sub"])
def test_other_targets_are_refused(model, target):
    with pytest.raises(PlanError, match="only a repository of the hub"):
        prepare_push(model, target)


def test_a_broken_model_and_a_foreign_folder_are_refused(model, tmp_path):
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:-10])
    with pytest.raises(InputError):
        prepare_push(model, TARGET)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no weights in this folder"):
        prepare_push(tmp_path / "empty", TARGET)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("/etc/passwd")
    with pytest.raises(InputError, match="leaves the folder"):
        prepare_push(model, TARGET)


def test_hostile_text_does_not_reach_the_card(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["a|b`<script>\n---\ntags: x"]}))
    card = prepare_push(model, TARGET).card
    assert "<script>" not in card
    assert card.count("\n---\n") == 1
    with pytest.raises(InputError, match="--base-model is not the name"):
        prepare_push(model, TARGET, base_model="a/b\ntags: x")


def test_a_file_that_is_no_report(model, tmp_path):
    for text in ("{}", '{"tensors": [1]}', '{"tensors": 3}'):
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(InputError, match="is not a report of a conversion"):
            prepare_push(model, TARGET, report=tmp_path / "r.json")
