"""``mindspeed run`` as a script sees it; the scripts here use neither torch nor Megatron."""

import os
import subprocess
import textwrap

import pytest

from mindspeed.workbench.diagnostics import doctor
from tests.warm_processes import warm_python

RUN = ["-m", "mindspeed", "run", "--platform", "cpu"]


@pytest.fixture
def run(tmp_path):
    """Write a script and run it: ``run(source, options, arguments)``."""

    def start(source, options=(), arguments=(), **environment):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        command = [*warm_python(), *RUN, *options, "--", str(script), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})

    return start


def test_a_script_sees_its_own_arguments_name_and_folder_under_the_plan(run, tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'found'")
    done = run(
        """
        import sys, beside, os
        from mindspeed.engine.runtime import session
        print(__name__, sys.argv[1:], beside.NAME, os.path.basename(__file__), os.environ["RANK"], os.environ["WORLD_SIZE"])
        print(session.current().plan.names)
        """,
        options=["--features", "recompute", "--set", "recompute.granularity=selective", "--optimization-level", "0"],
        arguments=["--lr", "0.1", "--json"],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__ ['--lr', '0.1', '--json'] found script.py 0 1\n('recompute',)\n"


def test_the_traceback_is_the_scripts(run):
    done = run("def f():\n    raise ValueError('boom')\nf()\n")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    start = lines.index("Traceback (most recent call last):")
    assert [line for line in lines[start:] if line.startswith("  File")] == [
        line for line in lines[start:] if line.startswith("  File") and "script.py" in line
    ]
    assert lines[-1] == "ValueError: boom"


@pytest.mark.parametrize(("status", "rows"), [("'wrong usage'", 0), ("3", 0), ("0", 1)])
def test_a_program_that_fails_says_nothing_of_features_that_had_no_effect_yet(run, status, rows):
    done = run(
        f"""
        from mindspeed.engine.runtime import session
        session.current().proof.enter("step")
        raise SystemExit({status})
        """,
        options=["--features", "rms-norm", "--normalization", "RMSNorm", "--only"],
    )
    assert done.stderr.count("MS410 rms-norm has no effect: the operator rms_norm") == rows


def test_problems_of_the_request_come_before_anything_starts(mindspeed):
    done = mindspeed("run", "--platform", "cpu", "--features", "swigl", "--", __file__)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("MS201 the feature 'swigl' does not exist\n")


@pytest.mark.budget(12)
def test_several_processes_get_ranks_and_the_plan(run):
    done = run(
        """
        import os
        from mindspeed.engine.runtime import session
        print(f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {session.current().plan.world.tp}\\n", end="")
        """,
        options=["--nproc", "2", "--tp", "2"],
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 of 2: 2", "1 of 2: 2"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "status", "how"),
    [
        ("sys.exit(5)", 5, "ended with exit status 5"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
    ],
)
def test_the_rank_that_dies_is_named_and_its_status_passed_on(run, end, status, how):
    done = run(
        f"""
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            {end}
        time.sleep(60)
        """,
        options=["--nproc", "2"],
    )
    assert done.returncode == status
    assert without_summary(done.stderr)[0] == f"MS604 rank 1 {how}; the other ranks were stopped"


def test_inside_a_job_the_process_joins_it_and_ends_as_the_script(run):
    job = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    source = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE']); sys.exit(7)"
    done = run(source, options=["--tp", "4"], **job)
    assert (done.returncode, done.stdout) == (7, "1 4\n"), done.stderr


def test_without_megatron_nothing_is_started(mindspeed, monkeypatch):
    monkeypatch.setattr(doctor, "megatron_copies", lambda: ())
    done = mindspeed("run", "--", __file__)
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr == "MS502 megatron-core: not installed\n  fix: pip install 'mindspeed[train]'\n"


def test_a_script_that_does_not_exist_is_a_usage_error(mindspeed):
    done = mindspeed("run", "--", "no_such_script.py")
    assert done.exit_code == 2
    assert "File 'no_such_script.py' does not exist" in done.stderr


def without_summary(stderr: str) -> list[str]:
    """Return the lines of a run without the one that names the active features."""
    return [line for line in stderr.splitlines() if " sites patched" not in line]


PROBLEM = """
from mindspeed.plugins import Fix, MindSpeedError, Problem
raise MindSpeedError([Problem("MS605", "the script and the plan differ", fix=Fix.advise("make them agree"))])
"""


@pytest.mark.long
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_known_problem_inside_the_script_is_printed_once_and_without_traceback(run, nproc):
    done = run(PROBLEM, options=["--nproc", nproc])
    assert (done.returncode, done.stdout) == (1, "")
    assert without_summary(done.stderr) == ["MS605 the script and the plan differ", "  fix: make them agree"]


def test_a_run_names_its_active_features_and_the_arguments_that_the_script_never_gives_megatron(run):
    done = run("print('trained')", options=["--features", "async-ddp"])
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    first, *_ = lines = done.stderr.splitlines()
    assert "async-ddp" in first.partition(";")[0]
    assert " sites patched" in first
    assert "mindspeed: the script did not use the argument overlap_grad_reduce (async-ddp)" in lines


@pytest.mark.long
@pytest.mark.guards(38, processes=True)
def test_a_failure_of_rank_0_before_its_process_group_is_what_the_job_ends_with(run):
    done = run(
        """
        import os
        if os.environ["RANK"] == "0":
            raise OSError("no compiler")
        import torch.distributed as dist
        dist.init_process_group("gloo")
        """,
        options=["--nproc", "2"],
    )
    assert done.returncode == 1
    assert "OSError: no compiler" in done.stderr
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("MS6")]
    assert told in (  # whichever process is gone first
        "MS604 rank 0 ended with exit status 1; the other ranks were stopped",
        "MS612 rank 0 failed during the setup of the job: OSError: no compiler",
    )


@pytest.mark.parametrize(
    "words",
    [["--", "-m", "shown", "-q", "--json"], pytest.param(["-m", "shown", "-q", "--json"], marks=pytest.mark.long)],
    ids=["after the options", "as an option"],
)
def test_a_module_runs_as_under_python_m(tmp_path, words):
    package = tmp_path / "shown"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "beside.py").write_text("NAME = 'found'")
    (package / "__main__.py").write_text(
        "import os, sys\nfrom . import beside\nfrom mindspeed.engine.runtime import session\n"
        "print(__name__, __package__, beside.NAME, os.path.basename(sys.argv[0]), sys.argv[1:], session.current() is not None)"
    )
    done = subprocess.run([*warm_python(), *RUN, *words], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "__main__ shown found __main__.py ['-q', '--json'] True\n"), done.stderr


@pytest.mark.long
def test_pytest_runs_in_every_rank_under_the_plan(tmp_path):
    (tmp_path / "test_shown.py").write_text(
        "from mindspeed.engine.runtime import session\ndef test_it(): assert session.current().plan.names == ()"
    )
    command = [*warm_python(), *RUN, "--nproc", "2", "--optimization-level", "0", "--", "-m", "pytest", "-q", "test_shown.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 passed") == 2


def test_a_module_that_is_not_there_ends_as_under_python(tmp_path):
    done = subprocess.run([*warm_python(), *RUN, "--", "-m", "no_such_module"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith(": no module no_such_module that can be run\n")


def test_m_without_a_module_is_a_usage_error(mindspeed):
    done = mindspeed("run", "--", "-m")
    assert done.exit_code == 2
    assert "-m needs the name of a module" in done.stderr
