"""`validate --target`: verdicts on folders of real libraries, a case for every rule, and hostile input."""

import json
import re
import shutil
from dataclasses import replace

import pytest

import consumers_page
import hub_headers
import polyquant
from polyquant.analysis.consumers import NAMES, codes, consumer, consumer_findings
from polyquant.analysis.consumers.record import Effect
from polyquant.analysis.validate import targets
from polyquant.errors import PlanError, UnknownNameError, UnsupportedError
from polyquant.formats.gguf.edit import edit
from polyquant.types import Kind, Meta, Severity

VECTORS = hub_headers.VECTORS.parent
F16 = VECTORS / "models/tiny-llama-untied/tiny-llama-untied-f16.gguf"
TQ2 = VECTORS / "models/tiny-llama-untied/tiny-llama-untied-TQ2_0.gguf"
I2_S = VECTORS / "bitnet_gguf/tiny-bitnet-b158-i2_s-x86_128.gguf"
LAYER = "model.layers.0"
Q, DOWN, UP = f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.down_proj", f"{LAYER}.mlp.up_proj"


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    return consumers_page.table(tmp_path_factory.mktemp("hub"))


# ---------------------------------------------------------------- the folders of the libraries


def test_page_is_up_to_date():
    assert consumers_page.PAGE.read_text(encoding="utf-8") == consumers_page.page(), (
        "run: PYTHONPATH=src python scripts/consumers_page.py"
    )


RESULTS = {
    "same": ("accepts", "needs"),
    "loads": ("accepts", "needs"),
    "fails on a CPU": ("needs",),
    "wrong": ("miscomputes",),
    "rejected": ("rejects",),
}


@pytest.mark.parametrize("name", ["transformers", "mlx"])
def test_verdicts_agree_with_the_programs_that_were_run(name, verdicts):
    done = hub_headers.tried()[name]["cases"]
    assert len(done) == len(verdicts) == 73
    assert {c: verdicts[c][name][0] for c in done if verdicts[c][name][0] not in RESULTS[done[c]["result"]]} == {}


SHAPES = {"HUB110", "HUB113", "HUB116", "HUB118", "HUB120", "HUB122"}
"""Rules of vLLM that do not follow from the settings alone."""


def test_settings_are_judged_as_by_the_classes_of_vllm(verdicts):
    done = {c: r["result"] == "settings accepted" for c, r in hub_headers.tried()["vllm"]["cases"].items()}
    assert sum(done.values()) == 43 and len(done) == 53
    assert {c: not set(verdicts[c]["vllm"][1]) - SHAPES for c in done} == done


# ---------------------------------------------------------------- a case for every rule


def variant(case, folder, *, config=None, quant=None, tensors=None, files=None):
    """Unpack a case after changes of config.json, its quantization settings, the header and the files."""
    hub_headers.unpack(case, folder)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    if config is not None:
        config(values)
    if quant is not None:
        quant(values["quantization_config"])
    path.write_text(json.dumps(values))
    if tensors is not None:
        header = json.loads(json.dumps(hub_headers.headers()[case]["headers"]["model.safetensors"]))
        tensors(header)
        hub_headers.write_header(folder / "model.safetensors", in_order(header))
    if files is not None:
        files(folder)
    return folder


def in_order(header):
    """New offsets after a change of shapes."""
    sizes = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4, "U32": 4, "I64": 8}
    at = 0
    for name, entry in header.items():
        if name != "__metadata__":
            count = sizes[entry["dtype"]]
            for n in entry["shape"]:
                count *= n
            entry["data_offsets"], at = [at, at + count], at + count
    return header


def put(**entries):
    return lambda values: values.update(entries)


def drop(*keys):
    return lambda values: [values.pop(key) for key in keys]


def shape(name, *sizes, dtype=None):
    def change(header):
        header[name]["shape"] = list(sizes)
        header[name]["dtype"] = dtype or header[name]["dtype"]

    return change


def without(pattern):
    return lambda header: [header.pop(n) for n in list(header) if re.search(pattern, n)]


def group(**entries):
    return lambda quant: [g["weights"].update(entries) for g in quant["config_groups"].values()]


def remove(name):
    return lambda folder: (folder / name).unlink()


def write(name, text="{}"):
    return lambda folder: (folder / name).write_text(text)


INT4, FP8, AWQ, GPTQ, MLX = "ct-int4-g32-sym", "fp8-block128", "awq-gemm-g32", "gptq-v1-b4-g128", "mlx-affine-b4-g64"
NO_SETTINGS = {"config": drop("quantization_config")}
FOLDERS = {
    "HUB101": ("vllm", INT4, {"files": remove("config.json")}),
    "HUB102": ("vllm", "bnb-nf4", {}),
    "HUB104": ("vllm", GPTQ, {"quant": drop("sym")}),
    "HUB105": ("vllm", "gptq-v1-b3-g32", {}),
    "HUB106": ("vllm", "gptq-v1-b4-g32-actorder", {}),
    "HUB107": ("vllm", GPTQ, {"quant": put(group_size=16)}),
    "HUB108": ("vllm", AWQ, {"quant": put(bits=8)}),
    "HUB109": ("vllm", AWQ, {"quant": put(group_size=48)}),
    "HUB110": ("vllm", "awq-gemm-g64-partial", {}),
    "HUB111": ("vllm", INT4, {"quant": group(num_bits=1)}),
    "HUB112": ("vllm", "ct-int4-g32-gptq-actorder-group", {}),
    "HUB113": ("vllm", "ct-int4-channel-sym-ragged", {}),
    "HUB114": ("vllm", INT4, {"quant": put(sparsity_config={"targets": ["Linear"]})}),
    "HUB115": ("vllm", FP8, {"quant": put(activation_scheme="static")}),
    "HUB116": ("vllm", FP8, {}),
    "HUB117": ("vllm", "modelopt-int4-awq", {}),
    "HUB118": ("vllm", "modelopt-fp8-pb-wo", {}),
    "HUB119": ("vllm", "modelopt-mxfp4", {"quant": put(quant_method="mxfp4")}),
    "HUB120": ("vllm", "torchao-intx4-g32", {}),
    "HUB121": ("vllm", FP8, {"quant": put(quant_method="fbgemm_fp8")}),
    "HUB122": ("vllm", "ct-w4a8-int", {}),
    "HUB123": ("vllm", INT4, NO_SETTINGS),
    "HUB124": ("vllm", INT4, {"files": write("quant_model_description.json")}),
    "HUB125": ("vllm", INT4, {"devices": 3}),
    "HUB126": ("vllm", "modelopt-nvfp4-a16", {"quant": put(quant_algo="NVFP4")}),
    "HUB201": ("sglang", INT4, {"files": remove("config.json")}),
    "HUB202": ("sglang", "torchao-intx4-g32", {}),
    "HUB203": ("sglang", "gptq-v1-b4-g32-asym", {}),
    "HUB204": ("sglang", AWQ, {"quant": drop("zero_point")}),
    "HUB205": ("sglang", AWQ, {"quant": put(bits=3)}),
    "HUB206": ("sglang", "awq-gemm-g64-partial", {}),
    "HUB207": ("sglang", "ct-int3-g32-sym", {}),
    "HUB208": ("sglang", "ct-int4-g32-asym-odd", {}),
    "HUB209": ("sglang", FP8, {"quant": put(weight_block_size=[128])}),
    "HUB210": ("sglang", FP8, {}),
    "HUB211": ("sglang", "modelopt-fp8-pcpt", {}),
    "HUB212": ("sglang", "modelopt-mxfp4", {"quant": put(quant_method="mxfp4")}),
    "HUB215": ("sglang", "bnb-nf4", {}),
    "HUB216": ("sglang", INT4, NO_SETTINGS),
    "HUB217": ("sglang", INT4, {"devices": 8}),
    "HUB218": ("sglang", INT4, {"files": write("quant_model_description.json")}),
    "HUB219": ("sglang", "modelopt-mxfp8", {}),
    "HUB220": ("sglang", "modelopt-fp8-pcpt", {"quant": put(quant_algo="FP8")}),
    "HUB301": ("transformers", INT4, {"files": remove("config.json")}),
    "HUB302": ("transformers", "modelopt-fp8-kv", {}),
    "HUB303": ("transformers", "modelopt-nvfp4", {}),
    "HUB304": ("transformers", MLX, {}),
    "HUB305": ("transformers", INT4, {}),
    "HUB306": ("transformers", GPTQ, {"quant": put(bits=5)}),
    "HUB307": ("transformers", "gptq-v1-b4-g32-dynamic", {}),
    "HUB308": ("transformers", "gptq-v1-b4-channel-odd", {}),
    "HUB309": ("transformers", "ct-int4-g32-gptq-actorder-group", {}),
    "HUB310": ("transformers", "ct-int4-g32-asym", {}),
    "HUB311": ("transformers", "fp8-block128-odd", {}),
    "HUB312": ("transformers", FP8, {"tensors": shape(f"{UP}.weight_scale_inv", 3, 1)}),
    "HUB313": ("transformers", FP8, {"quant": put(quant_method="nvfp4")}),
    "HUB314": ("transformers", INT4, NO_SETTINGS),
    "HUB318": ("transformers", FP8, {"quant": put(scale_fmt="e5m3")}),
    "HUB319": ("transformers", "bnb-fp4-odd", {}),
    "HUB401": ("mlx", MLX, {"files": remove("config.json")}),
    "HUB403": ("mlx", MLX, {"files": lambda f: (f / "model.safetensors").rename(f / "weights.safetensors")}),
    "HUB404": ("mlx", "bnb-nf4", {}),
    "HUB405": ("mlx", MLX, {"config": drop("quantization")}),
    "HUB406": ("mlx", "ct-w8a8-int-dynamic", {}),
    "HUB407": ("mlx", INT4, {}),
    "HUB408": ("mlx", "modelopt-fp8-kv", {}),
    "HUB409": ("mlx", GPTQ, {}),
    "HUB410": ("mlx", GPTQ, {"tensors": without("g_idx")}),
    "HUB411": ("mlx", "gptq-v1-b8-g32", {}),
    "HUB412": ("mlx", AWQ, {"tensors": shape(f"{Q}.scales", 8, 128)}),
    "HUB413": ("mlx", MLX, {"config": lambda c: c["quantization"].update({DOWN: {"bits": 8, "group_size": 64}})}),
    "HUB414": ("mlx", MLX, {"config": drop("quantization", "quantization_config")}),
    "HUB415": ("mlx", "ct-int8-channel-sym-packed", {"config": put(model_type="deepseek_v3")}),
    "HUB416": ("mlx", MLX, {"config": put(model_type="bloom")}),
    "HUB501": ("llama.cpp", INT4, {}),
    "HUB502": ("llama.cpp", AWQ, {}),
    "HUB601": ("ollama", INT4, {}),
    "HUB602": ("ollama", AWQ, {}),
    "HUB603": ("ollama", "ct-fp8-channel-dynamic", {}),
    "HUB608": ("ollama", INT4, {"files": remove("tokenizer.json")}),
}  # fmt: skip


@pytest.mark.parametrize("code", FOLDERS)
def test_every_rule_finds_its_case(code, tmp_path):
    name, case, changes = FOLDERS[code]
    devices = changes.get("devices", 1)
    folder = variant(case, tmp_path / "model", **{k: v for k, v in changes.items() if k != "devices"})
    found = list(consumer_findings(folder, name, devices))
    assert code in {f.code for f in found}
    assert all(len(str(f)) < 400 and "\n" not in str(f) for f in found)


GGUF = {
    "HUB103": ("vllm", F16, {}),
    "HUB213": ("sglang", TQ2, {}),
    "HUB315": ("transformers", F16, {"general.architecture": "minicpm"}),
    "HUB316": ("transformers", I2_S, {}),
    "HUB317": ("transformers", F16, {}),
    "HUB402": ("mlx", F16, {}),
    "HUB503": ("llama.cpp", I2_S, {}),
    "HUB505": ("llama.cpp", F16, {"general.architecture": "lama"}),
    "HUB506": ("llama.cpp", F16, {"llama.context_length": None}),
    "HUB507": ("llama.cpp", F16, {"tokenizer.ggml.model": "words"}),
    "HUB604": ("ollama", TQ2, {}),
    "HUB605": ("ollama", F16, {"general.architecture": "lama"}),
    "HUB606": ("ollama", F16, {"tokenizer.chat_template": None}),
}
"""Code -> program, file, changes of keys; None removes a key."""


def changed(source, target, changes):
    keys = polyquant.open(source).metadata
    gone = [k for k, v in changes.items() if v is None and k in keys]
    edit(source, target, set={k: Meta(Kind.STRING, v) for k, v in changes.items() if v is not None}, remove=gone)
    return target


@pytest.mark.parametrize("code", GGUF)
def test_every_rule_about_gguf_files_finds_its_case(code, tmp_path):
    name, source, changes = GGUF[code]
    path = changed(source, tmp_path / "model.gguf", changes) if changes else source
    assert code in {f.code for f in consumer_findings(path, name)}


def test_every_rule_has_a_case():
    others = {"HUB214", "HUB504", "HUB508", "HUB509", "HUB510", "HUB607"}  # below
    others |= {"HUB320", "HUB321"}  # tests/formats/test_nvfp4_experts.py, test_separate_experts.py
    assert set(FOLDERS) | set(GGUF) | others == set(codes())


def test_bpe_needs_a_pre_tokenizer(tmp_path):
    path = changed(F16, tmp_path / "a.gguf", {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": None})
    assert "HUB508" in {f.code for f in consumer_findings(path, "llama.cpp")}
    other = changed(path, tmp_path / "b.gguf", {"tokenizer.ggml.pre": "my-own"})
    assert "HUB507" in {f.code for f in consumer_findings(other, "llama.cpp")}


def test_split_models(tmp_path):
    names = list(polyquant.open(F16))
    for no in range(2):
        counts = {"split.count": Meta(Kind.UINT16, 2), "split.no": Meta(Kind.UINT16, no)}
        renamed = {n: f"more.{n}" for n in names} if no else {}
        edit(F16, tmp_path / f"model-0000{no + 1}-of-00002.gguf", set=counts, rename_tensor=renamed)
    first, second = sorted(tmp_path.iterdir())
    found = {(n, p): {f.code for f in consumer_findings(p, n)} for n in NAMES for p in (first, second)}
    assert "HUB509" in found["llama.cpp", second] and "HUB509" not in found["llama.cpp", first]
    assert "HUB214" in found["sglang", first] and "HUB607" in found["ollama", first]


@pytest.mark.parametrize(("codec", "code"), [("q8_1", "HUB504"), ("q4_0", None)])
def test_types_of_activations_are_not_weights(codec, code, monkeypatch):
    opened = polyquant.open(VECTORS / "models/tiny-llama-untied/tiny-llama-untied-Q4_0.gguf")
    weights = {n: replace(w, codec=polyquant.codec(codec)) for n, w in opened.items()}
    monkeypatch.setattr("polyquant.analysis.consumers.model.look", lambda path: replace(opened, weights=weights))
    found = {f.code for f in consumer_findings(opened.path, "llama.cpp")}
    assert found == ({code} if code else set())


def test_meta_files_are_not_models():
    found = {f.code for f in consumer_findings(VECTORS / "gguf/meta_all_types_v3_le.gguf", "llama.cpp")}
    assert found >= {"HUB505"}


def test_files_without_tensors_are_not_models(monkeypatch):
    empty = replace(polyquant.open(F16), weights={})
    monkeypatch.setattr("polyquant.analysis.consumers.model.look", lambda path: empty)
    assert {f.code for f in consumer_findings(F16, "llama.cpp")} == {"HUB510"}


@pytest.mark.parametrize("name", ["vllm", "sglang", "transformers", "mlx", "llama.cpp", "ollama"])
def test_sound_models_have_no_findings(name, tmp_path):
    accepted = {"mlx": MLX, "transformers": "gptoss-mxfp4"}.get(name, INT4)
    path = F16 if name in ("llama.cpp", "ollama") else hub_headers.unpack(accepted, tmp_path / "model")
    assert [f for f in consumer_findings(path, name) if f.severity is not Severity.NOTE] == []


# ---------------------------------------------------------------- records


def test_records_are_complete():
    for name in NAMES:
        record = consumer(name)
        assert record.name == name and record.reads and record.program.version
        assert all(rule.explanation.endswith(".") and " Source: " in rule.explanation for rule in record.rules)
    assert all(polyquant.explain(code) == text for code, text in codes().items())
    numbers = [rule.code for name in NAMES for rule in consumer(name).rules]
    assert len(numbers) == len(set(numbers)) == len(codes())


def test_severity_follows_from_the_effect(verdicts):
    assert {Effect(v) for case in verdicts.values() for v, _ in case.values() if v != "accepts"} == set(Effect)


# ---------------------------------------------------------------- validate


def test_targets_of_all_formats(tmp_path):
    assert targets() == (*NAMES, "vllm-ascend", "mindie")
    folder = hub_headers.unpack(INT4, tmp_path / "model")
    with pytest.raises(UnknownNameError, match="did you mean vllm"):
        polyquant.validate(folder, target="vlm")
    with pytest.raises(UnsupportedError, match="mindie applies to msModelSlim folders only"):
        polyquant.validate(folder, target="mindie")
    with pytest.raises(PlanError, match="do not depend on the number of devices"):
        polyquant.validate(folder, target="mlx", tp=2)
    with pytest.raises(PlanError, match="without a target"):
        polyquant.validate(folder, tp=2)


def test_a_target_needs_headers_only(tmp_path):
    folder = hub_headers.unpack("gptq-v1-b4-g32-actorder", tmp_path / "model")
    found = polyquant.validate(folder, target="vllm", headers=True)
    assert [f.code for f in found if f.code.startswith("HUB")] == ["HUB106"]
    assert "HUB106" in {f.code for f in polyquant.validate(folder, target="vllm")}


def test_gpus_divide_layers(tmp_path):
    folder = hub_headers.unpack(GPTQ, tmp_path / "model")
    assert not [f for f in polyquant.validate(folder, target="vllm", tp=2, headers=True) if f.code == "HUB125"]
    found = [f for f in polyquant.validate(folder, target="vllm", tp=3, headers=True) if f.code == "HUB125"]
    assert "4 attention heads do not divide among 3 devices" in {f.message for f in found}


HOSTILE = {
    "settings as text": put(quantization_config="gptq"),
    "method as a number": put(quantization_config={"quant_method": 4}),
    "groups as a list": put(quantization_config={"quant_method": "compressed-tensors", "config_groups": [1, 2]}),
    "a group without weights": put(
        quantization_config={"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 4}, "b": None}}
    ),
    "odd values": put(
        quantization_config={
            "quant_method": "gptq", "bits": "4", "group_size": [], "sym": 1, "dynamic": {"(a+)+$": 3},
        }
    ),
    "blocks of zero": put(quantization_config={"quant_method": "fp8", "weight_block_size": [0, -1]}),
    "one block size": put(quantization_config={"quant_method": "fp8", "weight_block_size": 128}),
    "sizes as text": put(hidden_size="128", num_attention_heads=0, intermediate_size=None, architectures="Qwen"),
    "text model as text": put(text_config="none", quantization_config=None),
    "own settings as a list": put(quantization={"bits": [], "group_size": {}, DOWN: {"bits": 0, "group_size": 0}}),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("case", [INT4, "fp8-block128-odd", "gptq-v1-b4-channel-odd", MLX])
def test_hostile_settings(case, hostile, name, tmp_path):
    folder = variant(case, tmp_path / "model", config=HOSTILE[hostile])
    devices = 2 if consumer(name).parallel else 1
    for finding in consumer_findings(folder, name, devices):
        assert finding.code in codes()


@pytest.mark.parametrize("name", NAMES)
def test_hostile_shapes(name, tmp_path):
    def change(header):
        for i, entry in enumerate(e for n, e in header.items() if n != "__metadata__"):
            entry["shape"] = ([], [0], [0, 0], [1, 1, 1], [7])[i % 5]

    for case in (INT4, AWQ, GPTQ, MLX, FP8, "modelopt-fp8-pb-wo"):
        folder = variant(case, tmp_path / case, tensors=change)
        assert all(f.code in codes() for f in consumer_findings(folder, name, 2 if consumer(name).parallel else 1))


def test_broken_files_are_findings_of_the_format(tmp_path):
    folder = hub_headers.unpack(INT4, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    assert any(f.severity is Severity.ERROR for f in polyquant.validate(folder, target="vllm"))
    shutil.rmtree(folder)
