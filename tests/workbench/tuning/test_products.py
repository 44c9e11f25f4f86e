"""Speeds of products that a user measures, and the searches that use them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mindspeed.cli import main
from mindspeed.workbench.tuning import products
from mindspeed.workbench.tuning.measure import Store, machine_facts
from mindspeed.workbench.tuning.products import with_products
from mindspeed.workbench.tuning.time import DEFAULTS, Machine

JOB = (
    *("--world-size", "1", "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "512"),
    *(
        "--seq-length",
        "64",
        "--global-batch-size",
        "2",
        "--dtype",
        "bf16",
        "--pp",
        "1",
        "--micro-batch-size",
        "1",
        "--top",
        "1",
    ),
)


PLAIN = Machine(DEFAULTS["cpu"])


def seconds(store: Path, *words: str) -> float:
    """Return the predicted seconds of the best layout."""
    result = CliRunner().invoke(main, ["tune", "--json", "--store", str(store), "--platform", "cpu", *JOB, *words])
    assert result.exit_code == 0, result.output
    best: float = json.loads(result.stdout)["rows"][0]["predicted_seconds"]
    return best


def test_measured_speeds_are_kept_for_later_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ROWS", (16, 64))
    monkeypatch.setattr(products, "WIDTHS", ((32, 32), (64, 32)))
    monkeypatch.setattr(products, "SECONDS", 1e-4)
    assumed, measured = seconds(tmp_path), seconds(tmp_path, "--measure-products")
    assert seconds(tmp_path) == measured != assumed
    (file,) = tmp_path.glob("*/products-bf16.json")
    file.write_text(json.dumps({"flops": 1.0, "moved": 1.0}))
    assert seconds(tmp_path) > 1e6 * assumed
    for text in ('{"flops": NaN, "moved": -1}', '{"flops": 0.0, "moved": 0.0}', '{"flops": 1.0}', "[1]", '{"flops": 1.'):
        file.write_text(text)
        assert with_products(PLAIN, Store(file.parent.parent, machine_facts("cpu"), {}), "bf16") == PLAIN


def test_the_fit_gives_back_the_speeds_that_made_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    operation, byte = 2e-12, 3e-11
    sizes = iter([(m, k, n) for m in products.ROWS for k, n in products.WIDTHS])

    def times(run: object, synchronize: object) -> list[float]:
        m, k, n = next(sizes)
        return [2 * m * k * n * operation + 4 * (m * k + k * n + m * n) * byte]

    monkeypatch.setattr(products, "_times", times)
    lines: list[str] = []
    found = products.measured_products("fp32", "cpu", lines.append)
    assert found == pytest.approx({"flops": operation, "moved": byte}, rel=1e-3)
    assert len(lines) == len(products.ROWS) * len(products.WIDTHS)


def test_products_of_another_platform_are_refused(tmp_path: Path) -> None:
    words = ["tune", "--store", str(tmp_path), "--platform", "npu", "--measure-products", *JOB]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert "MS345 products of platform npu cannot be measured on this machine, whose platform is cpu" in result.output
