import json

import click
import pytest

from mindspeed.cli.feature_list import TITLES
from mindspeed.cli.output import print_table
from mindspeed.plugins import Category

KEYS = ["name", "summary", "stability", "level", "slots", "platforms", "distribution", "version", "state", "error"]


def test_the_listing_has_the_fixed_keys_and_nothing_else(mindspeed):
    done = mindspeed("features", "list", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert list(data) == ["features"]
    assert all(list(row) == KEYS for row in data["features"])
    row = next(row for row in data["features"] if row["name"] == "recompute")
    assert (row["distribution"], row["state"], row["error"]) == ("mindspeed", "ok", None)
    assert row["slots"] == ["recompute-policy"]


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_every_feature_has_one_line_with_its_whole_summary_under_its_category(mindspeed):
    done = mindspeed("features", "list")
    lines = done.stdout.splitlines()
    assert len(lines) <= 96
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if "..." in line] == []
    title = "Communication of tensor parallelism and checkpoints (4)"
    start = lines.index(title)
    assert lines[start : start + 2] == [
        title,
        "  coc                        2  Overlap linear layers with their collectives",
    ]
    assert len([line for line in lines if line.startswith("  ")]) == 71


def test_the_wide_listing_is_aligned_text_off_a_terminal(mindspeed):
    lines = mindspeed("features", "list", "--wide").stdout.splitlines()
    assert lines[0].split() == ["NAME", "LEVEL", "STABILITY", "PLATFORMS", "SLOTS", "FROM", "STATE", "SUMMARY"]
    column = lines[0].index("STATE")
    assert {line[column:].split()[0] for line in lines[1:] if line.startswith(("recompute", "swiglu", "tensor-"))} == {"ok"}


def test_twenty_columns_show_name_level_and_summary(mindspeed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    lines = mindspeed("features", "list", "swiglu", "operator").stdout.splitlines()
    assert lines[:4] == ["Fused operators (1)", "  swiglu 1", "    Compute SwiGLU", "      by one"]
    assert max(map(len, lines)) <= 20


def test_every_category_has_a_heading_in_words():
    assert list(TITLES) == list(Category)
    assert {title for title in TITLES.values() if title == title.lower()} == set()


def test_words_find_a_feature_by_its_category_and_description(mindspeed):
    assert "moe-zero-memory" in names(mindspeed("features", "list", "moe", "--json"))
    assert names(mindspeed("features", "list", "moe_zero", "--json")) == ["moe-zero-memory"]
    assert names(mindspeed("features", "list", "slopes", "score", "--json")) == []
    assert names(mindspeed("features", "list", "slope", "--json")) == ["alibi"]


def test_no_import_reads_metadata_alone(mindspeed, install, tmp_path):
    install("acme", {"acme-clip": ""})
    (tmp_path / "acme_features.py").write_text("raise SystemExit('imported')")
    data = json.loads(mindspeed("features", "list", "--json", "--no-import").stdout)
    (row,) = [row for row in data["features"] if row["name"] == "acme-clip"]
    unknown = dict.fromkeys(["summary", "stability", "level", "slots", "platforms", "error"])
    assert row == {"name": "acme-clip", "distribution": "acme", "version": "1.0", "state": "not loaded"} | unknown
    assert "acme 1.0" in mindspeed("features", "list", "--no-import").stdout


def names(done):
    return [row["name"] for row in json.loads(done.stdout)["features"]]


def test_the_list_is_filtered_by_words_level_slot_platform_and_distribution(mindspeed, install):
    install("acme", {"acme-clip": ""})
    assert "ring-attention" in names(mindspeed("features", "list", "ring", "attention", "--json"))
    policies = ["adaptive-recompute", "recompute", "recompute-in-advance", "recompute-in-bubble"]
    assert names(mindspeed("features", "list", "--slot", "recompute-policy", "--json")) == policies
    assert names(mindspeed("features", "list", "--from", "acme", "--json")) == ["acme-clip"]
    assert "swiglu" not in names(mindspeed("features", "list", "--level", "0", "--json"))
    assert "swiglu" in names(mindspeed("features", "list", "--platform", "npu", "--json"))
    done = mindspeed("features", "list", "unheard-of")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "no feature matches\n")


def test_on_a_terminal_no_line_is_wider_than_it_and_no_word_is_lost(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    print_table(("NAME", "SUMMARY"), [("ring-attention", "Context parallelism by passing key and value blocks around a ring")])
    text = click.unstyle(capsys.readouterr().out)
    lines = text.splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= 60
    assert " ".join(word for line in lines[1:] for word in line.split()) == (
        "ring-attention Context parallelism by passing key and value blocks around a ring"
    ), text
