"""The pages that ``--html`` writes: one file, without scripts, and nothing is loaded from elsewhere."""

import re
import shlex

import pytest

from mindspeed.cli.plan_html import expert_group
from mindspeed.workbench.html_page import bar, chart, page, table

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
    assert not re.search(r"<script|src=|href=|@import|url\(", text)


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
    assert "<svg" in text


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


def test_a_bar_has_the_shares_of_its_parts_and_a_line_its_ends():
    assert 'style="width:25.00%" title="weights: 1.0"' in bar([("weights", 1.0)], 4.0)
    assert 'points="50.0,190.0 710.0,10.0"' in chart({"a": [(1, 2.0), (3, 4.0)]}, "loss")
    assert chart({"a": [(1, 2.0)]}, "loss") == "<p>loss: too few points for a line</p>"
