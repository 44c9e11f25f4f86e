"""Each row of the table in SECURITY.md: what is read there does, or does not, make code run."""

import json
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from mindspeed import registry
from mindspeed.cli import main
from mindspeed.megatron.indexed_data import read_index
from mindspeed.ops import build_cache
from mindspeed.plugins.found import installed
from mindspeed.problems import MindSpeedError
from mindspeed.workbench.training.corpus import prepare
from tests.ops.built import pretend_built

ROOT = Path(__file__).parent.parent
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in (ROOT / "SECURITY.md").read_text().partition("| what | read by")[2].partition("\n\n")[0].splitlines()[2:]
]
TESTS = {
    "metadata of installed packages": "metadata_alone",
    "features of installed packages": "features_run_where_they_may",
    "job file (`-f`)": "job_file",
    "`--set`, `MINDSPEED_SET`, `MINDSPEED_FEATURES`, `MINDSPEED_WITHOUT`": "settings",
    "shell script": "shell_script",
    "checkout of Megatron-LM that a command names": "checkout",
    "plan file (`MINDSPEED_PLAN`)": "plan_file",
    "lock file (`--lock`, `MINDSPEED_LOCK`)": "lock_file",
    "`MINDSPEED_CACHE/ops`": "built_operators",
    "`MINDSPEED_CACHE/baselines`": "baselines",
    "`MINDSPEED_CACHE/megatron-*.json`": "source_cache",
    "`MINDSPEED_CACHE/matrix.jsonl`, `bisect.jsonl`": "verdicts",
    "`MINDSPEED_CACHE/tuning`": "measurements",
    "`MINDSPEED_CACHE/stdlib-*`": "prepared_library",
    "checkpoint, its index and `mindspeed.json`, `features.json`": "checkpoint_that_is_looked_at",
    "checkpoint that a job loads": "checkpoint_that_is_loaded",
    "prepared data (`--data`: `.bin`, `.idx`)": "prepared_data",
    "`MINDSPEED_CSRC`, `CXX`": "compiler",
    "other variables of [this list](mindspeed/engine/resolution/variables.yaml)": "other_variables",
}


class Marks:
    """A pickle that makes a file where it is loaded as it stands."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "it ran"


def mindspeed(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


def package(folder, source):
    (folder / "acme_features.py").write_text(source)
    info = folder / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mindspeed.features]\nacme-clip = acme_features:Acme\n")


def test_every_row_has_a_test_and_every_test_a_row():
    assert [row[0] for row in ROWS] == list(TESTS)
    assert all(f"test_{name}" in globals() for name in TESTS.values())


def test_metadata_alone(tmp_path, mark, monkeypatch):
    package(tmp_path, f"import os; os.mkdir({str(mark)!r})")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "acme-clip" in [row.name for row in installed()]
    assert mindspeed("features", "list", "--no-import").exit_code == 0
    assert not mark.exists()


@pytest.mark.parametrize(("plugins", "runs"), [("all", True), ("none", False), ("bolt", False), ("acme", True)])
def test_features_run_where_they_may(tmp_path, mark, monkeypatch, plugins, runs):
    package(tmp_path, f"import os; os.mkdir({str(mark)!r})")
    command = [sys.executable, "-m", "mindspeed", "features", "list", "clip"]
    variables = {**os.environ, "PYTHONPATH": str(tmp_path), "MINDSPEED_PLUGINS": plugins}
    subprocess.run(command, env=variables, capture_output=True, timeout=60, check=False)
    assert mark.exists() == runs


def test_job_file(tmp_path, mark):
    job = tmp_path / "job.yaml"
    job.write_text(f"world: !!python/object/apply:os.mkdir [{str(mark)!r}]\n")
    assert "MS305 the job file cannot be read: the tag " in mindspeed("features", "check", "-f", job).stderr
    assert not mark.exists()


def test_settings(mark, monkeypatch):
    value = f"recompute.granularity=!!python/object/apply:os.mkdir [{str(mark)!r}]"
    assert mindspeed("features", "check", "recompute", "--set", value).exit_code == 1
    monkeypatch.setenv("MINDSPEED_SET", value)
    assert mindspeed("features", "check", "recompute").exit_code == 1
    assert not mark.exists()


def test_shell_script(tmp_path, mark):
    script = tmp_path / "train.sh"
    make = f"mkdir '{mark}'"
    script.write_text(f"{make}\nA=$({make})\n`{make}`\npython pretrain_gpt.py --tp $({make}) --num-layers 2\n")
    mindspeed("check", "--static", script)
    assert not mark.exists()


def checkout(tmp_path, mark):
    module = tmp_path / "megatron" / "training" / "arguments.py"
    module.parent.mkdir(parents=True)
    module.write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("")
    return script


@pytest.mark.parametrize("static", [True, False])
def test_checkout(tmp_path, mark, static):
    script = checkout(tmp_path, mark)
    done = mindspeed("check", *(["--static"] if static else []), "--", "python", script, "--num-layers", "2")
    assert done.exit_code in (0, 1, 3)
    assert not mark.exists()  # what runs there may write no file


def test_plan_file(tmp_path, mark):
    plan = registry.plan(["recompute"], platform="cpu").to_json()
    (tmp_path / "hostile.py").write_text(f"import os; os.mkdir({str(mark)!r})")
    planned = next(patch for patch in plan["patches"] if patch["patch"]["kind"] == "replace")
    planned["patch"]["value"] = "hostile:anything"
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan))
    with pytest.raises(
        MindSpeedError, match=r"MS305 the plan file cannot be read: the plan digest .* does not match the content of the plan"
    ):
        registry.read_plan(file)
    assert not mark.exists()  # a digest is no signature: with its own, activating the plan would import the module


def test_lock_file(tmp_path, mark):
    lock = tmp_path / "job.lock"
    assert mindspeed("lock", "recompute", "--platform", "cpu", "-o", lock).exit_code == 0
    data = json.loads(lock.read_text())
    data["job"] = f"world: !!python/object/apply:os.mkdir [{str(mark)!r}]\n"
    lock.write_text(json.dumps(data))
    mindspeed("preflight", "--lock", lock)
    assert not mark.exists()


def test_built_operators(tmp_path):
    built = pretend_built(tmp_path / "cache")
    built.library.chmod(0o777)
    assert build_cache.find(built.key, tmp_path / "cache") is None
    assert build_cache.not_trusted(built.key, tmp_path / "cache").code == "MS518"


def test_baselines(tmp_path, mark, monkeypatch):
    from mindspeed.workbench.verification import pool
    from mindspeed.workbench.verification.shape import GPT, Recipe

    monkeypatch.setenv("MINDSPEED_CACHE", str(tmp_path / "cache"))
    plan, recipe = registry.plan(platform="cpu", level=0), Recipe(GPT, steps=1)
    pool.store(plan, recipe, 1, [])
    (file,) = (tmp_path / "cache" / "baselines").iterdir()
    file.write_bytes(pickle.dumps(Marks(mark)))
    assert pool.load(plan, recipe, 1) is None
    assert not mark.exists()


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_source_cache(tmp_path, monkeypatch, mode):
    from mindspeed.engine.inspection.source_cache import SourceCache

    monkeypatch.setenv("MINDSPEED_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "source.py"
    source.write_text("")
    cache = SourceCache([tmp_path])
    cache._rows, cache._new = {"name": ("kept", [])}, True
    cache.save()
    (file,) = (tmp_path / "cache").iterdir()
    file.chmod(mode)
    assert SourceCache([tmp_path]).get("name", lambda: "read") == ("kept" if mode == 0o600 else "read")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("MINDSPEED_CACHE", str(folder))
    return folder


def refused(file, fix, read):
    """A file of the cache that other users can write is refused, with the line that mends it."""
    file.chmod(0o666)
    with pytest.raises(MindSpeedError) as caught:
        read()
    assert str(caught.value) == (
        f"MS518 {file} is writable for other users (mode 0666); nothing is loaded from there\n  fix: {fix}"
    )
    file.chmod(0o600)
    read()


def test_verdicts(cache):
    from mindspeed.workbench.verification.matrix.store import VerdictStore, default_store

    store = VerdictStore(default_store())
    with store.hold():
        pass
    refused(store.path, f"chmod -R go-w {store.path}, if its contents are trusted", store.read)


def test_measurements(cache):
    from mindspeed.workbench.tuning.measure import Measurement, Store

    store = Store(cache / "tuning", {"host": "a"}, {"num_layers": 1})
    file = store.file_of("one")
    values = dict.fromkeys(Measurement.__dataclass_fields__, 0)
    store.put(Measurement(**values | {"key": "one"}))
    refused(file, f"chmod -R go-w {file}, if its contents are trusted", store.measurements)


def test_prepared_library(cache, monkeypatch, tmp_path):
    from mindspeed.workbench.training import corpus

    library = tmp_path / "library"
    library.mkdir()
    (library / "module.py").write_text("some text\n" * 100)
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    file = Path(corpus.standard_library() + ".bin")
    refused(file, f"chmod -R go-w {file}, if its contents are trusted", corpus.standard_library)


OF_CACHE = ["ops", "baselines", "matrix.jsonl", "tuning", "stdlib-x.bin", "megatron-x.json"]


@pytest.mark.parametrize("name", OF_CACHE)
@pytest.mark.parametrize("planted", ["link", "mode", "owner", "mode of the cache"])
def test_what_others_could_have_written_is_refused_everywhere_in_the_cache(cache, tmp_path, monkeypatch, name, planted):
    from mindspeed.files.cache_folder import distrust

    place = cache / name
    (tmp_path / "elsewhere").write_text("")
    if planted == "link":
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.write_text("")
        place.chmod(0o600)
        assert distrust(place, cache) is None
    if planted == "mode":
        place.chmod(0o620)
    if planted == "mode of the cache":
        cache.chmod(0o777)
    if planted == "owner":
        if os.getuid() == 0:
            os.chown(place, 4243, -1)
        else:
            monkeypatch.setattr(os, "getuid", lambda: 4242)
    assert distrust(place, cache).code == "MS518"


@pytest.mark.parametrize("verb", ["list", "inspect", "verify"])
def test_checkpoint_that_is_looked_at(tmp_path, mark, verb):
    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    for name in (".metadata", "common.pt", "mindspeed.json", "features.json", "metadata.json"):
        (folder / name).write_bytes(pickle.dumps(Marks(mark)))
    done = mindspeed("checkpoint", verb, tmp_path / "run")
    assert "Traceback" not in done.output
    assert not mark.exists()


def test_checkpoint_that_is_loaded():
    (row,) = [row for row in ROWS if row[0] == "checkpoint that a job loads"]
    assert row[2] == "yes: megatron-core and torch read it"


def test_prepared_data(tmp_path, mark):
    (tmp_path / "text.txt").write_text("some text")
    prefix = str(tmp_path / "data")
    prepare([str(tmp_path / "text.txt")], prefix, "bytes")
    for end in (".idx", ".bin"):
        Path(prefix + end).write_bytes(pickle.dumps(Marks(mark)))
    with pytest.raises(MindSpeedError):
        read_index(prefix)
    assert not mark.exists()


def test_compiler(tmp_path, mark, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\nmkdir '{mark}'\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MINDSPEED_CACHE", str(tmp_path / "cache"))
    assert not mark.exists()
    mindspeed("ops", "build")
    assert mark.exists()  # as the table says


def test_other_variables(tmp_path, mark, monkeypatch):
    for name in ("MINDSPEED_PLATFORM", "MINDSPEED_STRICT", "MINDSPEED_OPS", "MINDSPEED_KEPT_MEMORY", "MINDSPEED_TRACE"):
        monkeypatch.setenv(name, f"$(mkdir '{mark}')")
        done = mindspeed("features", "check", "recompute")
        assert "Traceback" not in done.output
        monkeypatch.delenv(name)
    assert not mark.exists()


@pytest.mark.long
def test_settings_that_take_text(tmp_path, mark, monkeypatch):
    """No setting of any feature imports a module that it names."""
    (tmp_path / "named_by_a_setting.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    catalog = registry.catalog()
    for name in catalog.names:
        for setting in catalog.feature(name).Args.model_fields:
            with suppress(MindSpeedError):
                registry.plan([name], settings={name: {setting: "named_by_a_setting:run"}}, platform="cpu")
    assert not mark.exists()
