"""The pages that ``--html`` writes: one file, without scripts, and nothing is loaded from elsewhere."""

import re
import shlex
from xml.etree import ElementTree

import pytest

from mindspeed.cli.plan_html import expert_group
from mindspeed.workbench.html_page import bar, page, table
from mindspeed.workbench.pictures.curves import BASELINE, Bars, Chart, Line, drawn, drawn_bars
from tests.page_structure import PageStructure, charts_without_units

MODEL = shlex.split(
    "--platform npu --megatron 0.16.1 --num-layers 8 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8"
    " --num-query-groups 4 --vocab-size 512 --seq-length 64 --micro-batch-size 1 --global-batch-size 16 --dtype bf16"
    " --normalization RMSNorm --gated-linear-unit --rotary --activation silu"
)


def cells(text):
    return [re.sub(r"<[^>]*>", "\n", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", text.replace("<br>", " "))]


def test_the_page_of_a_plan_says_why_and_which_rank_holds_what(mindspeed, tmp_path):
    file = tmp_path / "plan.html"
    sizes = ["--world-size", "16", "--tp", "2", "--pp", "2", "--ep", "2", "--num-experts", "4"]
    done = mindspeed("features", "plan", "sequence-parallel", *sizes, *MODEL, "--html", file)
    assert (done.exit_code, done.stderr) == (0, "")
    text = file.read_text("utf-8")
    assert "16 ranks: tp 2 x cp 1 x dp 4 x pp 2" in text
    assert "Stage 0: layers 0 to 3, embedding" in text
    assert "Stage 1: layers 4 to 7, output layer and loss" in text
    row = cells(text)
    first = row.index("rank 2 experts 2 to 3")
    assert row[first - 2 : first + 2] == ["dp 1", "whole", "rank 2 experts 2 to 3", "rank 3 experts 2 to 3"]
    assert "requested" in row
    structure = PageStructure(text)
    sections = ["Requested", "Added", "Features and patches", "Memory", "Ranks", "Notes"]
    assert structure.sections == [*sections, "Job", "Megatron arguments", "Patches, in order"]
    (graph,) = structure.pictures
    assert {"requested", "sequence-parallel", "the data-parallel size is 4", "sequence_parallel = True"} <= set(graph)
    assert text.count('<div class="bar">') == 2
    assert (structure.loaded, structure.tags & {"script", "link"}, structure.has_dark_scheme) == ([], set(), True)
    assert "(default)" not in text


def test_a_plan_without_sizes_says_why_its_page_predicts_no_memory(mindspeed, tmp_path):
    file = tmp_path / "plan.html"
    assert mindspeed("features", "plan", "async-ddp", "--world-size", "2", "--platform", "cpu", "--html", file).exit_code == 0
    assert "No prediction: memory cannot be estimated without num_layers, " in file.read_text("utf-8")


@pytest.mark.long
@pytest.mark.parametrize(("expert_tp", "ep"), [(2, 2), (1, 4), (2, 4), (1, 8)])
def test_ranks_have_the_expert_groups_of_megatron(expert_tp, ep):
    from megatron.core.parallel_state import RankGenerator

    generator = RankGenerator(tp=expert_tp, ep=ep, dp=8 // expert_tp // ep, pp=1, cp=1, order="tp-cp-ep-dp-pp")
    for group in generator.get_ranks("ep"):
        assert [expert_group(rank, expert_tp, ep) for rank in group] == list(range(ep))


def test_the_page_of_memory_has_a_bar_for_each_stage_and_every_tensor(mindspeed, tmp_path):
    file = tmp_path / "memory.html"
    done = mindspeed("memory", "plan", "--world-size", "4", "--pp", "2", "--num-experts", "0", *MODEL, "--html", file)
    assert done.exit_code == 0
    text = file.read_text("utf-8")
    assert text.count('<div class="bar">') == 2
    assert "attention: queries, keys, values" in cells(text)
    assert "loss: logits" in cells(text)


def test_the_page_of_a_schedule_has_its_timeline(mindspeed, tmp_path):
    file = tmp_path / "schedule.html"
    done = mindspeed("schedule", "show", "--schedule", "1f1b", "--pp", "2", "--micro-batches", "4", "--html", file)
    assert done.exit_code == 0
    text = file.read_text("utf-8")
    assert "<h1>1f1b: pp 2, vpp 1, 4 micro-batches, placement loop</h1>" in text
    assert "bubble 20.00%" in text
    (timeline,) = PageStructure(text).pictures
    assert timeline[:2] == ["1f1b: planned", "rank 0"]
    assert timeline[-2:] == ["forward", "both gradients"]


def test_the_picture_of_a_schedule_is_a_file_that_stands_alone(mindspeed, tmp_path):
    file = tmp_path / "schedule.svg"
    done = mindspeed("schedule", "show", "--schedule", "zero-bubble", "--pp", "2", "--micro-batches", "4", "--svg", file)
    assert done.exit_code == 0
    root = ElementTree.parse(file).getroot()
    assert (root.get("width"), root.find("{*}svg").get("x"), root.find("{*}svg").get("width")) == ("1170", "60", "1100")
    assert "prefers-color-scheme: dark" in file.read_text("utf-8")


def test_a_place_that_cannot_be_written_is_a_problem(mindspeed, tmp_path):
    (tmp_path / "file").write_text("")
    done = mindspeed("schedule", "show", "--schedule", "1f1b", "--html", tmp_path / "file" / "a.html")
    assert done.exit_code == 3
    assert done.stderr.startswith("MS516 ")
    assert done.stderr.endswith("  fix: choose another --html FILE\n")


def test_text_is_escaped_and_numbers_stand_to_the_right():
    text = page("a < b", table(("x",), [("<i>\nj",), (1234,)]))
    assert "<title>a &lt; b</title>" in text
    assert '<tr><td>&lt;i&gt;<br>j</td></tr><tr><td class="number">1,234</td></tr>' in text


def test_a_bar_has_the_shares_of_its_parts():
    assert 'style="width:25.00%" title="weights: 1.0"' in bar([("weights", 1.0)], 4.0)


def test_a_chart_has_labels_with_units_a_legend_and_the_colour_of_the_page():
    lines = [Line("a", [(1, 2.0), (3, 4.0)]), Line("b", [(1, 3.0), (3, 5.0)], colour=BASELINE), Line("c", [(2, 2.5)], "points")]
    text = drawn(Chart("Loss & more", "step", "loss (nats per token)", lines, "a note", [("level", 3.5, BASELINE)]))
    page = PageStructure(text)
    assert charts_without_units(page.figures) == []
    assert page.figures["Loss & more"][-4:] == ["a", "b", "c", "level"]
    assert 'aria-label="Loss &amp; more: loss (nats per token) by step"' in text
    assert "currentColor" in text
    assert "#010203" not in text
    assert text == drawn(Chart("Loss & more", "step", "loss (nats per token)", lines, "a note", [("level", 3.5, BASELINE)]))
    assert "too few points for a curve" in drawn(Chart("loss", "step", "loss (nats)", [Line("a", [(1, 2.0)])]))


def test_bars_have_their_changes():
    texts = PageStructure(drawn_bars(Bars("Time", "change (%)", [("first", -12.5), ("second", 3.0)]))).figures["Time"]
    assert {"first  -12.5", "second  +3.0", "change (%)"} <= set(texts)
