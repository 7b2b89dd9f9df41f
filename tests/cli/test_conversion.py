"""`convert`, `quantize` and `repair` for new users: dry runs, misspelt names, mislabelled files."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS
from polyquant.errors import InputError, PlanError, UnknownNameError
from polyquant.registry import codec
from polyquant.storage import phases

LLAMA = VECTORS / "models/tiny-llama-untied/hf"
SLIM = VECTORS / "msmodelslim/v0/fp16/w8a16"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 12345\n"


# ---------------------------------------------------------------- dry runs


def test_a_dry_run_reports_a_memory_limit_that_is_too_small(polyquant, tmp_path):
    done = polyquant("convert", LLAMA, tmp_path / "a.gguf", "--codec", "q8_0", "--max-memory", "1MB", "--dry-run")
    assert done.code == 0 and "without --dry-run this is refused: the memory limit is too small" in done.out
    real = polyquant("convert", LLAMA, tmp_path / "a.gguf", "--codec", "q8_0", "--max-memory", "1MB")
    assert real.code == 2 and "pass" not in real.line and "; --max-memory " in real.line
    assert not list(tmp_path.iterdir())


def test_a_dry_run_accepts_an_existing_target(polyquant, tmp_path):
    target = tmp_path / "out.gguf"
    target.write_bytes(b"here already")
    dry = polyquant("convert", LLAMA, target, "--dry-run")
    assert dry.code == 0 and "plan: gguf" in dry.out and target.read_bytes() == b"here already"
    assert "without --dry-run this is refused: " in dry.out and "target exists" in dry.out
    told = json.loads(polyquant("convert", LLAMA, target, "--dry-run", "--format", "json").out)
    (why,) = told["refused"]
    assert "target exists" in why and "target exists" in polyquant("convert", LLAMA, target).line
    assert "not a model file" in polyquant("convert", LLAMA, target, "--dry-run", "--overwrite").out
    (free,) = [
        json.loads(polyquant("convert", LLAMA, tmp_path / "new.gguf", "--dry-run", "--format", "json").out)["refused"]
    ]
    assert free == []
    assert "does not exist" in polyquant("convert", LLAMA, tmp_path / "no/out.gguf", "--dry-run").out


def test_a_dry_run_writes_nothing(polyquant, tmp_path):
    assert polyquant("quantize", LLAMA, tmp_path / "out", "--to", "hf", "--codec", "bf16", "--dry-run").code == 0
    assert not list(tmp_path.iterdir())


def test_a_profile_accounts_for_the_time(polyquant, tmp_path):
    options = ("quantize", LLAMA, tmp_path / "a.gguf", "--codec", "q4_0", "--threads", 2, "--overwrite")
    done = polyquant(*options, "--profile")
    assert done.code == 0, done
    lines = [line.split() for line in done.out.splitlines()]
    assert ["phase", "seconds", "share", "bytes", "per", "second"] in lines
    assert "s with 2 threads; seconds of phases are summed over them" in done.out
    told = json.loads(polyquant(*options, "--profile", "--format", "json").out)
    profile = told["profile"]
    phases = {entry["phase"]: entry for entry in profile["phases"]}
    assert {"plan", "check", "read", "quantize", "write", "checksum", "sync", "journal", "idle"} <= phases.keys()
    assert sum(entry["share"] for entry in phases.values()) == pytest.approx(1)
    assert 0 < sum(entry["seconds"] for entry in phases.values()) < 2 * profile["seconds"]
    tensors = sum(tensor["nbytes"] for tensor in told["tensors"])
    assert phases["write"]["bytes"] == phases["checksum"]["bytes"] == tensors
    assert phases["read"]["bytes"] > tensors
    assert "profile" not in json.loads(polyquant(*options, "--format", "json").out)
    assert polyquant(*options, "--profile", "--dry-run").code == 2


def test_a_phase_counts_for_itself_only(monkeypatch):
    now = iter([0.0, 1.0, 4.0, 6.0, 7.0, 10.0])
    monkeypatch.setattr(phases, "perf_counter", lambda: next(now))
    with phases.profiled() as profile, phases.phase("quantize", 5) as spent:
        with phases.phase("read", 8):
            pass
        with phases.phase("read", 2):
            pass
        spent.nbytes += 1
    assert profile.spent == {"read": phases.Spent(4.0, 10, 2), "quantize": phases.Spent(6.0, 6, 1)}
    with phases.phase("read", 1):  # without a profile
        assert profile.spent["read"].count == 2


UNWRITABLE = {
    ("iq2_xs", "gguf"): "iq2_xs can be read, not written",
    ("iq1_m", "gguf"): "iq1_m can be read, not written; choose another codec, e.g. q4_k",
    ("compressed.i8.static", "compressed-tensors"): "add --calibration FILE, or choose a codec without .static",
    ("q8_k", "gguf"): "q8_k is for activations",
    ("q8_1", "gguf"): "q8_1 is for activations",
    ("i8", "gguf"): "i8 holds integers",
    ("u8", "hf"): "u8 holds integers",
    ("bool", "hf"): "bool holds integers",
    ("i2_s.x86", "gguf"): "i2_s.x86 needs ternary weights",
    ("hf_bitnet.bitlinear", "hf"): "hf_bitnet.bitlinear needs ternary weights",
    ("q4_k", "hf"): "folder cannot store q4_k",
    ("trellis.3", "gguf"): "GGUF has no type for trellis.3",
}


@pytest.mark.parametrize(("name", "to"), UNWRITABLE)
def test_a_codec_that_cannot_be_written_is_refused_by_the_plan(name, to, polyquant, tmp_path):
    options = ("--codec", name, "--to", to)
    dry, real = (polyquant("convert", LLAMA, tmp_path / "out", *options, *more) for more in (("--dry-run",), ()))
    assert dry.code == real.code == 2 and UNWRITABLE[name, to] in dry.line and dry.line == real.line
    assert not list(tmp_path.iterdir())


def test_activation_types_are_read_but_not_copied(tmp_path):
    """A file with q8_k, as an older polyquant wrote."""
    from formats.gguf_files import file, saved, tensor, text

    blocks = codec("q8_k").pack(codec("q8_k").quantize(np.ones((4, 256), np.float32)))["blocks"]
    path = saved(
        tmp_path, file([text("general.architecture", "none")], [tensor("a", (256, 4), 15, 0)], blocks.tobytes())
    )
    np.testing.assert_allclose(pq.open(path)["a"].dequantize(), 1, atol=1e-2)
    with pytest.raises(PlanError, match=r"q8_k is for activations.*use q8_0 instead"):
        pq.plan(path, "gguf")
    assert pq.plan(path, "gguf", codec="q8_0", requantize=True).steps[0].target.name == "q8_0"


def test_ternary_weights_are_accepted(tmp_path):
    folder = VECTORS / "bitnet_gguf/hf_packed_autobitlinear"
    assert {s.target.name for s in pq.plan(folder, "gguf", codec="i2_s.x86").steps} >= {"i2_s.x86"}


# ---------------------------------------------------------------- misspelt names

NAMES = {
    ("--codec", "q4_k_m"): "q4_k_m is a recipe, not a codec; use --recipe q4_k_m, or --codec with q4_k",
    ("--codec", "Q4_K_M"): "use --recipe q4_k_m",
    ("--codec", "i2_s"): "--codec with i2_s.x86 or i2_s.arm or i2_s.x4 or trinity.i2_s",
    ("--codec", "trinity"): "it has several layouts: trinity.i2_s, trinity.tq2_0",
    ("--codec", "int4"): "choose compressed.p4.g128 or gptq.4.g128 or awq.4.g128 or mlx.4.g64 or q4_0",
    ("--codec", "INT8"): "choose compressed.i8 or compressed.p8.g128 or w8a16 or q8_0",
    ("--recipe", "q4_k"): "q4_k is a codec: use --codec q4_k, or --recipe q4_k_s or q4_k_m",
    ("--recipe", "trellis.3"): "trellis.3 is a codec: use --codec trellis.3",
    ("--rule", "*ffn*=q5_k_m"): "q5_k_m is a recipe, not a codec; a rule takes a codec, e.g. q5_k",
}


@pytest.mark.parametrize("options", NAMES)
def test_misspelt_names_get_suggestions(options, polyquant, tmp_path):
    outcome = polyquant("convert", LLAMA, tmp_path / "out.gguf", *options)
    assert outcome.code == 2 and NAMES[options] in outcome.line


@pytest.mark.parametrize("word", ["int4", "int8"])
def test_suggested_codecs_exist(word):
    with pytest.raises(UnknownNameError) as found:
        codec(word)
    suggested = found.value.hint.removeprefix("choose ").split(" or ")
    assert len(suggested) > 3 and [codec(name).name for name in suggested] == suggested


@pytest.mark.parametrize("target", ["compressed-tensors", "gptq", "awq", "mlx"])
def test_a_codec_of_another_format_is_answered_with_one_that_works(target, polyquant, tmp_path):
    command = ("quantize", LLAMA, tmp_path / "out", "--to", target, "--dry-run", "--codec")
    outcome = polyquant(*command, "q4_0")
    assert outcome.code == 2 and "no weight can be stored as" in outcome.line
    suggested = outcome.line.rpartition("; choose ")[2].removesuffix(", or another format").split(" or ")
    assert all(polyquant(*command, name).code == 0 for name in suggested)


def test_misspelt_names_get_suggestions_in_python():
    with pytest.raises(PlanError, match="q4_k_m is a recipe"):
        pq.plan(LLAMA, "gguf", codec="q4_k_m")
    with pytest.raises(UnknownNameError, match="q4_k is a codec"):
        pq.plan(LLAMA, "gguf", recipe="q4_k")
    with pytest.raises(UnknownNameError, match=r"several layouts: i2_s\.x86, i2_s\.arm, i2_s\.x4, trinity\.i2_s"):
        codec("i2_s")


@pytest.mark.parametrize("command", ["convert", "quantize"])
@pytest.mark.parametrize("dry", [("--dry-run",), ()])
def test_a_rule_that_matches_nothing_is_a_warning(command, dry, polyquant, tmp_path):
    outcome = polyquant(command, LLAMA, tmp_path / "out.gguf", "--rule", "*nosuch*=q8_0", *dry)
    assert outcome.code == 0 and "warning: --rule *nosuch*=q8_0 matches no tensor" in outcome.out


# ---------------------------------------------------------------- unknown architectures


def test_unknown_architectures_need_a_flag_in_both_directions(polyquant, tmp_path):
    shutil.copytree(LLAMA, tmp_path / "hf")
    config = json.loads((LLAMA / "config.json").read_text()) | {
        "model_type": "none",
        "architectures": ["NoneForCausalLM"],
    }
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    for source, target in (("hf", "a.gguf"), ("a.gguf", "back")):
        for dry in ((), ("--dry-run",)):
            refused = polyquant("convert", tmp_path / source, tmp_path / target, *dry)
            assert refused.code == 2 and "architecture 'none' is unknown" in refused.line
            assert "--allow-unknown" in refused.line and not (tmp_path / target).exists()
        written = polyquant("convert", tmp_path / source, tmp_path / target, "--allow-unknown")
        assert written.code == 0 and "warning: architecture 'none' is unknown" in written.out
    with pytest.raises(PlanError, match="architecture 'none' is unknown"):
        pq.convert(tmp_path / "hf", tmp_path / "b.gguf")


# ---------------------------------------------------------------- Git LFS


def lfs(name, source=LLAMA):
    def make(folder):
        shutil.copytree(source, folder / "model")
        (folder / "model" / name).write_bytes(POINTER)
        return folder / "model"

    return make


def single(name):
    def make(folder):
        (folder / name).write_bytes(POINTER)
        return folder / name

    return make


LFS = {
    "gguf": single("model.gguf"),
    "safetensors": single("model.safetensors"),
    "bin": single("pytorch_model.bin"),
    "weights of a folder": lfs("model.safetensors"),
    "config": lfs("config.json"),
    "tokenizer": lfs("tokenizer.json"),
    "msmodelslim": lfs("quant_model_weight_w8a16.safetensors", SLIM),
    "trellis": lfs("model-00001-of-00002.safetensors", VECTORS / "trellis/v3_seed_kn"),
}


@pytest.mark.parametrize("case", LFS)
def test_git_lfs_pointers_are_named(case, polyquant, tmp_path):
    path = LFS[case](tmp_path)
    for to in ("out.gguf", "out"):  # one reads the tokenizer, the other copies it
        outcome = polyquant("convert", path, tmp_path / to, "--allow-unknown")
        assert outcome.code == 2 and "is a Git LFS pointer" in outcome.line and "git lfs pull" in outcome.line
        assert not (tmp_path / to).exists()
    checked = polyquant("validate", path)
    assert checked.code in (1, 2) and "Git LFS pointer" in checked.out + checked.err


def test_a_pointer_next_to_the_weights_is_not_copied(tmp_path):
    folder = lfs("tokenizer_config.json")(tmp_path)
    with pytest.raises(InputError, match=r"tokenizer_config\.json: is a Git LFS pointer"):
        pq.plan(folder, "hf", codec="bf16")


def test_a_text_file_about_git_lfs_is_copied(tmp_path):
    folder = lfs("chat_template.jinja")(tmp_path)
    (folder / "chat_template.jinja").write_bytes(POINTER + b" " * 2000)
    pq.plan(folder, "hf", codec="bf16")


# ---------------------------------------------------------------- repair


def test_repair_of_a_sound_folder_exits_with_an_error(polyquant, tmp_path):
    outcome = polyquant("repair", SLIM, tmp_path / "out")
    assert outcome.code == 1 and "nothing to repair" in outcome.line and "was not written" in outcome.line
    told = polyquant("repair", SLIM, tmp_path / "out", "--format", "json")
    assert told.code == 1 and json.loads(told.out)["path"] is None
    assert not list(tmp_path.iterdir())
    assert polyquant("repair", SLIM, tmp_path / "out", "--dialect", "v1").code == 0 and (tmp_path / "out").exists()
