from __future__ import annotations

import json

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


def test_the_listing_is_aligned_text_off_a_terminal(mindspeed):
    lines = mindspeed("features", "list").stdout.splitlines()
    assert lines[0].split() == ["NAME", "LEVEL", "STABILITY", "PLATFORMS", "SLOTS", "FROM", "STATE", "SUMMARY"]
    column = lines[0].index("STATE")
    assert {line[column:].split()[0] for line in lines[1:] if line.startswith(("recompute", "swiglu", "tensor-"))} == {"ok"}


def test_no_import_reads_metadata_alone(mindspeed, install, tmp_path):
    install("acme", {"acme-clip": ""})
    (tmp_path / "acme_features.py").write_text("raise SystemExit('imported')")
    data = json.loads(mindspeed("features", "list", "--json", "--no-import").stdout)
    (row,) = [row for row in data["features"] if row["name"] == "acme-clip"]
    unknown = dict.fromkeys(["summary", "stability", "level", "slots", "platforms", "error"])
    assert row == {"name": "acme-clip", "distribution": "acme", "version": "1.0", "state": "not loaded"} | unknown
    assert "acme 1.0" in mindspeed("features", "list", "--no-import").stdout
