"""``report.html`` of a run."""

import json

from mindspeed.workbench.training.reporting import report_page


def test_a_report_has_curves_of_finite_values_the_result_and_the_effects(tmp_path):
    rows = [
        {"step": 1, "loss": 5.0, "seconds": 0.5, "gradient_norm": 1.0},
        {"step": 2, "loss": float("nan"), "seconds": 0.5, "gradient_norm": 2.0},
        {"step": 3, "loss": 4.0, "seconds": 0.25, "gradient_norm": 3.0},
        {"step": 3, "heldout_loss": 4.5},
        {"step": 4, "loss": 4.0, "seconds": 0.25, "gradient_norm": None},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    effect = {"name": "swiglu", "summary": "swiglu: 2 sites, 2 effective, 1 reached (8 calls)"}
    (tmp_path / "report.json").write_text(json.dumps({"features": [effect]}))
    text = report_page(tmp_path, {"heldout_loss": 4.5, "sample": "<b>"}, tokens=100)
    assert "<td>heldout_loss</td><td>4.5</td>" in text
    assert "<td>swiglu</td><td>2 sites, 2 effective, 1 reached (8 calls)</td>" in text
    assert '<text x="2" y="16">5</text>' in text
    assert '<text x="2" y="16">400</text>' in text
    assert "&lt;b&gt;" not in text
    (tmp_path / "report.json").unlink()
    assert "<tbody></tbody>" in report_page(tmp_path, {}, tokens=100)
