"""What ends a process with a plan is shown as problems; errors of the program itself as before."""

import sys

import pytest

from mindspeed import registry
from mindspeed.engine.runtime import rendezvous, uncaught
from mindspeed.problems import Fix, MindSpeedError, Problem
from mindspeed.process import run


@pytest.fixture(autouse=True)
def hook(monkeypatch, tmp_path):
    """The hook before ours prints the type of the error; a test before this one may have left a run folder or a hook."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(run, "_folders", [])
    monkeypatch.delenv(run.REPORT_VARIABLE, raising=False)
    monkeypatch.setattr(uncaught, "_before", None)
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: print("before:", kind.__name__, file=sys.stderr))
    uncaught.install()
    yield
    uncaught.uninstall()


def shown(capsys, error):
    try:
        raise error
    except BaseException as raised:
        sys.excepthook(type(raised), raised, raised.__traceback__)
    return capsys.readouterr().err


def test_problems_are_text(capsys):
    problem = Problem("MS606", "the loss is nan", fix=Fix.advise("lower the learning rate"))
    assert shown(capsys, MindSpeedError([problem])) == "MS606 the loss is nan\n  fix: lower the learning rate\n"


def test_with_the_trace_the_traceback_comes_first(capsys, monkeypatch):
    monkeypatch.setenv("MINDSPEED_TRACE", "1")
    text = shown(capsys, MindSpeedError([Problem("MS606", "the loss is nan", fix=Fix.advise("stop"))]))
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("MS606 the loss is nan\n  fix: stop\n")


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_an_error_of_the_program_is_shown_as_before(capsys, error):
    assert shown(capsys, error) == f"before: {type(error).__name__}\n"


def test_an_unforeseen_error_of_an_activation_has_an_author_and_a_file(capsys, monkeypatch, tmp_path):
    def fail(*_):
        raise OSError("the disk is gone")

    plan = registry.plan(level=0, platform="cpu")
    monkeypatch.setattr(registry, "refuse_disabled", fail)
    try:
        registry.activate(plan)
    except OSError as raised:
        sys.excepthook(type(raised), raised, raised.__traceback__)
    text = capsys.readouterr().err
    (file,) = tmp_path.glob("mindspeed-*.traceback.txt")
    assert text.startswith("MS901 OSError: the disk is gone\n  where: mindspeed ")
    assert text.endswith(f"  fix: report it with the traceback in {file}\n")


def test_an_error_after_a_rank_was_lost_names_the_rank(capsys, monkeypatch):
    monkeypatch.setattr(rendezvous, "lost_ranks", lambda seconds: [1, 5, 6])
    assert shown(capsys, RuntimeError("Connection reset by peer")) == (
        "before: RuntimeError\n"
        "MS604 ranks 1, 5-6 ended without an error message before this rank failed\n"
        "  fix: check the log of ranks 1, 5-6; after a SIGKILL, see the kernel log of the node\n"
    )


def test_a_hook_of_others_that_was_installed_since_stays(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", others := lambda *_: None)
    uncaught.uninstall()
    assert sys.excepthook is others


def test_a_traceback_lies_in_the_folder_of_the_run(monkeypatch, tmp_path):
    """A node's own folder for temporary files goes with the node."""
    (folder := tmp_path / "run").mkdir()
    monkeypatch.setattr(run, "_folders", [])
    monkeypatch.setenv("RANK", "3")
    run.set_run_folder(folder)
    problem = uncaught.unforeseen(OSError("the disk is gone"))
    (file,) = folder.glob("mindspeed-rank3-*.traceback.txt")
    assert problem.fix_text == f"report it with the traceback in {file}"


def test_without_a_known_run_it_lies_beside_the_report(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "_folders", [])
    monkeypatch.setenv("MINDSPEED_REPORT", str(tmp_path / "run.json"))
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    uncaught.unforeseen(OSError("the disk is gone"))
    assert list(tmp_path.glob("mindspeed-*.traceback.txt"))


def test_an_error_of_a_collective_after_a_rank_has_ended_names_the_rank(monkeypatch):
    monkeypatch.setattr(rendezvous, "lost_ranks", lambda seconds: [1])
    assert str(uncaught.lost_peer(RuntimeError("reset by peer"))) == (
        "MS604 rank 1 ended without an error message before this rank failed\n"
        "  fix: check the log of rank 1; after a SIGKILL, see the kernel log of the node"
    )
    assert uncaught.lost_peer(ValueError("mine")) is None
