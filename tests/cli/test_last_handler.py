"""Whatever ends a command has a code, an author and a fix; the traceback is in a file, or printed with MINDSPEED_TRACE=1."""

import json
import signal
import subprocess
import sys

import pytest

from mindspeed._version import __version__
from mindspeed.cli import feature_list


def raising(error: BaseException):
    def call(*_: object, **__: object):
        raise error

    return call


@pytest.fixture
def fail(monkeypatch, tmp_path):
    """Have `features list` raise an error; temporary files go into a folder of the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("mindspeed.process.run._folders", [])
    monkeypatch.delenv("MINDSPEED_REPORT", raising=False)
    return lambda error: monkeypatch.setattr(feature_list, "installed", raising(error))


@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), RecursionError("boom"), MemoryError("boom"), GeneratorExit("boom"), BaseException("boom")]
)
def test_an_error_that_nobody_foresaw_is_a_problem_and_its_traceback_a_file(mindspeed, fail, tmp_path, error):
    fail(error)
    done = mindspeed("features", "list")
    (file,) = tmp_path.glob("mindspeed-*.traceback.txt")
    line = raising.__code__.co_firstlineno + 2
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == (
        f"MS901 {type(error).__name__}: boom\n  where: mindspeed {__version__}, {__file__}:{line}\n"
        f"  fix: report it with the traceback in {file}\n"
    )
    assert file.read_text().startswith("Traceback (most recent call last):\n")


def test_with_the_trace_the_traceback_comes_first(mindspeed, fail, monkeypatch, capsys):
    monkeypatch.setenv("MINDSPEED_TRACE", "1")
    fail(RuntimeError("boom"))
    shown = mindspeed("features", "list").stderr
    assert shown.startswith("Traceback (most recent call last):\n")
    assert "  fix: report it; MINDSPEED_TRACE=1 before the command shows the traceback\n" in shown


def test_under_json_it_is_one_object(mindspeed, fail):
    fail(RuntimeError("boom"))
    done = mindspeed("features", "list", "--json")
    (problem,) = json.loads(done.stdout)["problems"]
    assert (done.exit_code, problem["code"], problem["message"]) == (1, "MS901", "RuntimeError: boom")


@pytest.mark.parametrize(
    ("package", "fix"),
    [("numpy", "pip install 'mindspeed[train]'"), ("yaml", "pip install PyYAML"), ("nosuch", "pip install nosuch")],
)
def test_a_missing_package_is_a_problem_of_the_environment(mindspeed, fail, package, fix):
    fail(ModuleNotFoundError(f"No module named '{package}'", name=f"{package}.core"))
    done = mindspeed("features", "list")
    name = fix.split()[-1] if package == "yaml" else package
    assert (done.exit_code, done.stderr) == (3, (f"MS501 {name} is not installed, but this command needs it\n  fix: {fix}\n"))


@pytest.mark.parametrize(
    ("package", "words"),
    [("numpy", ["data", "prepare", "text.txt", "-o", "data"]), ("yaml", ["features", "check", "rms-norm"])],
)
def test_verbs_without_a_package_say_so(tmp_path, package, words):
    (tmp_path / "text.txt").write_text("text")
    program = f"import sys; sys.modules[{package!r}] = None; from mindspeed.cli import main; main({words!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
    )
    assert done.returncode == 3
    assert " is not installed, but this command needs it\n  fix: pip install " in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupt_ends_with_the_status_of_a_shell(mindspeed, fail):
    fail(KeyboardInterrupt())
    done = mindspeed("features", "list")
    assert (done.exit_code, done.stderr) == (128 + signal.SIGINT, "interrupted\n")


def test_where_no_file_can_be_written_the_variable_is_named(mindspeed, fail, monkeypatch):
    fail(RuntimeError("boom"))
    monkeypatch.setattr("tempfile.mkstemp", raising(OSError()))
    assert "fix: report it; MINDSPEED_TRACE=1 before the command shows the traceback\n" in mindspeed("features", "list").stderr


def test_code_of_a_package_is_named(mindspeed, install, monkeypatch):
    install("acme", {"acme-clip": ""})
    mindspeed("features", "list")
    acme = sys.modules["acme_features"]
    exec(compile("def boom(cls):\n    raise RuntimeError('boom')\n", "acme_features.py", "exec"), vars(acme))
    monkeypatch.setattr(acme.Made0, "summary", classmethod(acme.boom))
    done = mindspeed("features", "list", "acme")
    assert done.stderr.splitlines()[:2] == ["MS901 RuntimeError: boom", "  where: acme 1.0, acme_features.py:2"]
