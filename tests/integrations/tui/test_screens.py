"""polyquant browse by keyboard and mouse, on small models."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time

import numpy as np
import pytest

pytest.importorskip("textual", reason="textual is not installed")

import polyquant
from golden import VECTORS
from integrations.browsing import browse
from polyquant.errors import InputError
from polyquant.integrations.tui.headers import Headers
from polyquant.integrations.tui.listing import Entry
from polyquant.integrations.tui.rows import Rows

HF = VECTORS / "models/tiny-llama-untied/hf"


@pytest.fixture(scope="module")
def ggufs(tmp_path_factory):
    """A model in three codecs."""
    folder = tmp_path_factory.mktemp("browse")
    out = {}
    for name in ("q8_0", "q4_0", "q2_k"):
        out[name] = folder / f"tiny-{name}.gguf"
        polyquant.quantize(HF, out[name], codec=name)
    return out


def test_the_first_screen_lists_the_tensors(ggufs):
    async def script(d):
        assert "gguf · llama" in d.lines[0] and "tiny-q8_0.gguf" in d.lines[0]
        listed = "\n".join(d.lines[3:9])
        assert re.search(r"▾ blk +18 tensors +q8_0 \+1 +8\.5\d +[\d.]+ KiB +\d+\.\d%", listed), d.text
        assert re.search(r"token_embd\.weight +512x256 +q8_0 +8\.50 +136\.0 KiB", listed)
        assert d.status == "21 of 21 tensors"

    browse([ggufs["q8_0"]], script)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60), (40, 12)])
def test_statistics_are_those_of_the_values(ggufs, size):
    name = "output.weight"
    w = polyquant.open(ggufs["q4_0"])[name].dequantize()

    async def script(d):
        await d.search("re:^output.w", "enter", "enter")
        (found,) = d.app.query_one("#tensors").measured[name]
        assert found.values == found.total == w.size and not found.is_sample
        assert (found.smallest, found.largest) == (w.min(), w.max())
        assert math.isclose(found.mean, w.mean(dtype=np.float64), rel_tol=1e-5)
        assert math.isclose(found.deviation, w.std(dtype=np.float64), rel_tol=1e-6)
        assert sum(found.counts) == w.size and found.zeros == (w == 0).mean()
        assert all(len(line) <= size[0] for line in d.lines)
        if size[1] >= 24:
            assert f"min {w.min():.4g}  max {w.max():.4g}" in d.text and "█" in d.text

    browse([ggufs["q4_0"]], script, size=size)


def test_search_filter_sort_and_tree(ggufs):
    async def script(d):
        listing = lambda: d.app.query_one("#tensors").listing  # noqa: E731 - replaced when models are opened
        await d.search("attn q")
        assert {listing().entries[i].name for i in listing().shown} == {
            f"blk.{i}.attn_{x}.weight" for i in (0, 1) for x in ("q", "norm", "output", "k", "v")
            if "q" in f"attn_{x}"
        }  # fmt: skip
        await d.press("escape")
        assert len(listing().shown) == 21 and not d.app.query("Search")
        await d.search("*.0.*norm*", "enter")
        assert len(listing().shown) == 2 and "2 of 21" in d.status
        await d.search(r"re:blk\.\d\.ffn_(up|down)", "enter")
        assert len(listing().shown) == 4
        await d.search("re:(")
        assert "not a regular expression" in d.text and len(listing().shown) == 4
        await d.press("escape", "f", "down", "down", "enter")
        assert {listing().entries[i].codec for i in listing().shown} == {"f32"}
        await d.press("f", "home", "enter", "s", "down", "down", "down", "enter", "t")
        sizes = [listing().entries[line.members[0]].nbytes for line in listing().lines]
        assert sizes == sorted(sizes, reverse=True) and len(sizes) == 21
        assert "by size" in d.status and "size▾" in d.lines[2]
        await d.press("r")
        assert [listing().entries[line.members[0]].nbytes for line in listing().lines] == sizes[::-1]

    browse([ggufs["q4_0"]], script)


def test_groups_open_and_close(ggufs):
    async def script(d):
        listing = d.app.query_one("#tensors").listing
        await d.press("home", "plus")
        assert len([line for line in listing.lines if line.leaf]) == 21
        await d.press("minus")
        assert [line.label for line in listing.lines] == [
            "token_embd.weight",
            "blk",
            "output.weight",
            "output_norm.weight",
        ]
        await d.press("down", "enter", "down", "right", "down")
        assert re.fullmatch(r"blk\.0\..+", d.app.query_one("#tensors").current.key)
        await d.press("left", "left")
        assert [line.key for line in listing.lines if line.is_open] == ["blk"]

    browse([ggufs["q4_0"]], script)


def test_the_mouse(ggufs):
    async def script(d):
        pane = d.app.query_one("#tensors")
        rows = pane.query_one(Rows)
        await d.pilot.click(rows, offset=(5, 2))
        await d.settled()
        assert rows.cursor == 1
        await d.pilot.click(rows, offset=(5, 2))  # a second click: the group closes
        await d.settled()
        assert not pane.current.is_open
        head = d.lines[2]
        await d.pilot.click(rows, offset=(head.index("size") + 2, 0))
        await d.settled()
        assert pane.listing.sort == "size"
        await d.pilot.click("#tabs", offset=(d.lines[1].index("Metadata"), 0))
        await d.settled()
        assert "general.architecture" in d.text

    browse([ggufs["q4_0"]], script)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_two_models_side_by_side(ggufs, size):
    expected = {t.name: t for t in polyquant.compare(HF, ggufs["q4_0"]).tensors}

    async def script(d):
        pane = d.app.query_one("#tensors")
        assert "c: compare" in d.status and "q4_0" in d.text
        await d.press("C")
        found = pane.listing.errors
        assert {n: (m.snr, m.cosine, m.worst) for n, m in found.items()} == {
            n: (t.error.snr, t.error.cosine, t.error.worst) for n, t in expected.items()
        }
        await d.press("t", "home")
        shown = [pane.listing.errors[line.key].snr for line in pane.listing.lines]
        assert shown == sorted(shown) and len(shown) == 21
        worst = pane.listing.lines[0].key
        assert pane.current.key == worst and f"{expected[worst].error.snr:.1f}" in d.lines[3]
        assert "exact" in d.text or size[1] < 40
        await d.press("enter")
        assert len(pane.measured[worst]) == 2 and len({one.edge for one in pane.measured[worst]}) == 1

    browse([HF, ggufs["q4_0"]], script, size=size)


def test_a_group_is_compared_alone(ggufs):
    async def script(d):
        await d.press("down", "down", "c")
        assert set(d.app.query_one("#tensors").listing.errors) == {
            n for n in polyquant.open(ggufs["q8_0"]) if n.startswith("blk.0.")
        }

    browse([ggufs["q8_0"], ggufs["q2_k"]], script)


def test_three_models_take_turns_as_the_second(ggufs):
    async def script(d):
        assert "tiny-q4_0" in d.lines[0]
        await d.press("2", "m")
        assert "tiny-q2_k" in d.lines[0] and "tiny-q4_0" not in d.lines[0] and "q2_k" in d.lines[4]
        await d.press("m")
        assert "tiny-q4_0" in d.lines[0]

    browse([ggufs["q8_0"], ggufs["q4_0"], ggufs["q2_k"]], script)


def test_metadata(ggufs):
    metadata = polyquant.open(ggufs["q4_0"]).metadata

    async def script(d):
        await d.press("2")
        await d.search("ggml.tokens", "enter")
        assert f"{len(metadata['tokenizer.ggml.tokens']):,} entries" in d.text
        await d.press("enter", "end")
        assert str(metadata["tokenizer.ggml.tokens"][-1]) in d.text
        await d.press("escape", "escape")
        assert "general.architecture" in d.text
        copied = []
        d.app.copy_to_clipboard = copied.append
        await d.search("architecture", "enter", "y", "Y")
        assert copied == ["llama", "general.architecture"]

    browse([ggufs["q4_0"]], script)


def test_metadata_that_differs(ggufs):
    async def script(d):
        await d.press("2", "x")
        assert d.app.query_one("#metadata").keys == ["general.file_type"]
        await d.press("x")
        assert len(d.app.query_one("#metadata").keys) == len(polyquant.open(ggufs["q4_0"]).metadata)

    browse([ggufs["q8_0"], ggufs["q4_0"]], script)


def test_tokens():
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    tokenizer = polyquant.load(HF).tokenizer
    table = tokenizer.tokens()

    async def script(d):
        await d.press("3")
        assert f"{len(table):,} tokens" in d.status
        await d.write("hello 7")
        ids = tokenizer.encode("hello 7", add_special=False)
        rows = d.app.query_one("#tokens").rows.source
        assert [rows.cells(i)[0] for i in range(len(ids))] == [str(i) for i in ids]
        await d.write("300")
        assert rows is not d.app.query_one("#tokens").rows.source
        assert d.app.query_one("#tokens").rows.source.cells(0)[0] == "300"

    browse([HF], script)


def test_template_and_findings(ggufs, tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    for file in HF.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}\n\x1b[2J[red]{{ m }}{% endfor %}")

    async def script(d):
        await d.press("4")
        assert r"\x1b[2J[red]{{ m }}{% endfor %}" in d.text and "1 chat template" in d.status
        await d.press("5")
        assert "MOD001" in d.text and "headers and small files" in d.status
        codes = [f.code for _, f in d.app.query_one("#findings").found]
        assert codes == [f.code for f in polyquant.validate(folder, headers=True)]
        d.app.query_one("#findings").rows.move_to(codes.index("MOD001"))
        await d.press("enter")
        assert "9 layers are declared" in d.text and "Usually an interrupted conversion" in d.text.replace("\n", " ")
        await d.press("escape", "V")
        assert "all data" in d.status

    browse([folder], script, size=(120, 40))


def test_a_model_without_tokenizer_or_template(ggufs, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((HF / "model.safetensors").read_bytes())

    async def script(d):
        await d.press("3")
        assert "no usable tokenizer" in d.text
        await d.press("4")  # a digit in the field of the tokenizer
        await d.press("tab")
        assert "no chat template" in d.status

    browse([tmp_path / "model.safetensors"], script)


def test_help_and_themes(ggufs):
    async def script(d):
        await d.press("question_mark")
        assert "side by side" in d.text or "Everywhere" in d.text
        await d.press("escape", "d")
        assert d.app.theme == "textual-light"
        await d.press("q")

    assert browse([ggufs["q4_0"]], script).return_value is None


def test_a_broken_file_ends_the_browser_with_its_error(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03\x00")

    async def script(d):
        await d.settled()

    app = browse([tmp_path / "x.gguf"], script)
    assert isinstance(app.return_value, InputError) and "x.gguf" in str(app.return_value)


def test_escape_cancels_and_the_screen_never_waits(ggufs):
    ended = []

    def endless(job):
        try:
            while True:
                job.tick(1, 2, "[bold]\x1b[2J")
                time.sleep(0.01)
        finally:
            ended.append(True)

    async def script(d):
        d.app.start("statistics", "reading", endless, lambda result: pytest.fail("it was cancelled"))
        await asyncio.sleep(0.3)
        await d.pilot.pause()
        assert r"reading 50%  [bold]\x1b[2J" in d.text
        await d.pilot.press("down")
        await d.pilot.pause()
        assert d.app.query_one(Rows).cursor == 1
        await d.pilot.press("t")
        await d.pilot.pause()
        assert not d.app.query_one("#tensors").listing.tree
        await d.press("escape")
        assert "cancelled: reading" in d.status

    browse([ggufs["q4_0"]], script)
    assert ended == [True]


def many(n: int) -> Headers:
    def name(i: int) -> str:
        return f"model.layers.{i // 1150}.mlp.experts.{i // 3 % 384}.{('up', 'gate', 'down')[i % 3]}_proj.weight"

    entries = (Entry(name(i), (7168, 2048), "bf16", 2 * 7168 * 2048) for i in range(n))
    return Headers("hf", "DeepseekV3ForCausalLM", tuple(entries))


def test_seventy_thousand_tensors(ggufs):
    """Each key takes 0.5 s at most alone; on a busy machine several times as much, even of processor time."""
    headers = many(70_000)

    async def script(d):
        listing = d.app.query_one("#tensors").listing
        for keys in (
            ("t",),
            ("end",),
            ("s", "down", "down", "down", "enter"),
            ("t",),
            ("plus",),
            ("minus",),
            ("slash", "6", "0", "."),
            ("escape",),
        ):
            began = time.thread_time()
            await d.press(*keys)
            assert time.thread_time() - began < 2.5 * len(keys), keys
        assert len(listing.shown) == 70_000

    browse([ggufs["q4_0"]], script, read_ahead=lambda: headers)
