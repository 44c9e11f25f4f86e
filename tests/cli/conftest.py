import importlib
import sys

import pytest
from click.testing import CliRunner

from mindspeed import registry
from mindspeed.cli import main

LAPTOP = ("--platform", "cpu", "--megatron", "0.16.1")
"""A made-up world, so that nothing depends on the machine that runs the tests."""


@pytest.fixture
def mindspeed(monkeypatch):
    """Run one command line in this process: ``mindspeed("features", "check", ...)``."""
    for name in (
        "MINDSPEED_FEATURES",
        "MINDSPEED_SET",
        "MINDSPEED_WITHOUT",
        "MINDSPEED_STRICT",
        "MINDSPEED_PLATFORM",
        "WORLD_SIZE",
    ):
        monkeypatch.delenv(name, raising=False)
    return lambda *arguments: CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a made-up package: ``install("acme", {"feature-name": "constraints"}, slots=...)``."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(distribution, features, slots="()"):
        lines = ["from mindspeed.plugins import *"]
        entries = ["[mindspeed.features]"]
        for number, (name, constraints) in enumerate(features.items()):
            declared = f'FeatureSpec("{name}", Category.TOOL, slots=frozenset({slots}), constraints=({constraints}))'
            lines.append(f"class Made{number}(Feature):\n    'Made up.'\n    spec = {declared}")
            entries.append(f"{name} = {distribution}_features:Made{number}")
        (tmp_path / f"{distribution}_features.py").write_text("\n".join(lines))
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join(entries) + "\n")
        monkeypatch.delitem(sys.modules, f"{distribution}_features", raising=False)
        importlib.invalidate_caches()
        registry.catalog.cache_clear()

    yield put
    registry.catalog.cache_clear()
    importlib.invalidate_caches()
