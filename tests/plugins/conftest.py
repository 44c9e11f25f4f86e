"""Made-up distributions."""

import importlib
import sys

import pytest


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a made-up distribution: a module and its metadata on sys.path."""

    def put(distribution, entry, source, version="1.2"):
        module = f"{distribution}_features"
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{distribution}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[mindspeed.features]\n{entry} = {module}:Acme\n")
        monkeypatch.delitem(sys.modules, module, raising=False)

    monkeypatch.syspath_prepend(str(tmp_path))
    yield put
    importlib.invalidate_caches()
