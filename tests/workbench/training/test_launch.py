import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from mindspeed.engine.runtime.launch import first_host, joined, launch, leave_problems
from mindspeed.problems import Problem, RunError
from mindspeed.process.run import UNFINISHED

SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "70001"}


def test_a_process_of_torchrun_joins():
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert joined({**variables, "HOME": "/"}) == variables


def test_a_task_of_slurm_joins_and_meets_on_the_first_host():
    assert joined({**SLURM, "SLURM_STEP_NODELIST": "rack[03-07,9]"}) == {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "rack03",
        "MASTER_PORT": "30001",
    }


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends a process with its launcher on Linux")
def test_a_process_whose_launcher_ended_while_it_started_ends():
    wait = "import os, time\nwhile os.getppid() != 1: time.sleep(0.01)\n"
    code = wait + "from mindspeed.engine.runtime.launch import end_with_launcher\nend_with_launcher()\nprint('goes on')"
    start = f'MINDSPEED_LAUNCHED=$PPID_OF_RANK {sys.executable} -c "$CODE" &'
    for launcher, expected in (("$$", ""), (str(os.getpid()), "goes on\n")):
        command = ["sh", "-c", start.replace("$PPID_OF_RANK", launcher)]
        done = subprocess.run(command, env=os.environ | {"CODE": code}, capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == (expected, "")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends a process with its launcher on Linux")
@pytest.mark.parametrize(("variables", "ends"), [({}, True), ({"MINDSPEED_JOINED": "rank 1"}, False)])
def test_a_rank_ends_with_its_torchrun_and_what_a_rank_has_started_does_not(tmp_path, variables, ends):
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import os, time\nfrom mindspeed.engine.runtime.launch import end_with_launcher\nend_with_launcher()\n"
        "print(os.getpid(), flush=True)\ntime.sleep(60)\n"
    )
    agent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, {str(rank)!r}]); time.sleep(60)"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_")}
    environ |= {"TORCHELASTIC_RUN_ID": "job"} | variables
    launcher = subprocess.Popen([sys.executable, "-c", agent], env=environ, stdout=subprocess.PIPE, text=True)
    process = psutil.Process(int(launcher.stdout.readline()))
    launcher.kill()
    launcher.wait()
    try:
        process.wait(timeout=2)
    except psutil.TimeoutExpired:
        process.kill()
        assert not ends
    else:
        assert ends


def test_a_process_ends_after_its_threads_and_handlers_and_without_its_modules():
    code = """
import atexit, sys, threading, time
from mindspeed.engine.runtime.launch import end_process

class Module:
    __del__ = lambda self: print("torn down")

sys.modules["late"] = Module()
atexit.register(print, "handler")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
end_process(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "thread\nhandler\n", "")


@pytest.mark.parametrize("environ", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, {"RANK": "0"}])
def test_a_process_alone_starts_its_own_job(environ):
    assert joined(environ) is None


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"RANK": "0", "WORLD_SIZE": "abc"}, "WORLD_SIZE"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK"),
        ({**SLURM, "SLURM_NTASKS": "two"}, "SLURM_NTASKS"),
    ],
)
def test_a_variable_that_is_no_number_is_named_with_its_value(environ, name):
    with pytest.raises(RunError) as caught:
        joined(environ)
    assert str(caught.value) == (
        f"MS301 the environment variable {name} is {environ[name]!r}, not a whole number\n"
        "  fix: start the job with torchrun or Slurm, which set these variables, or unset them"
    )


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("localhost", "localhost"),
        ("a,b", "a"),
        ("rack[03-07,9]-x,other", "rack03-x"),
        ("n[1,5]", "n1"),
        ("login,n[1-2]", "login"),
    ],
)
def test_the_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


def test_without_a_launcher_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    leave_problems(ValueError("x"))
    assert list(tmp_path.iterdir()) == []


def test_problems_are_left_where_the_launcher_looks(tmp_path, monkeypatch):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    leave_problems(RunError([Problem("MS606", "the loss is nan")]))
    left = json.loads(path.read_text())
    assert [(problem["code"], problem["message"]) for problem in left["problems"]] == [("MS606", "the loss is nan")]
    assert left["message"]["message"] == "RunError: MS606 the loss is nan"
    assert left["message"]["extraInfo"]["py_callstack"] == "MS606 the loss is nan"


def test_a_rank_that_repeats_why_another_one_failed_is_not_the_first_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1000.5)
    times = []
    for code in ("MS901", "MS612"):
        path = tmp_path / code
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        leave_problems(RunError([Problem(code, "it failed")]))
        times.append(int(json.loads(path.read_text())["message"]["extraInfo"]["timestamp"]))
    assert times == [1000, 1001]


KILLED = "import os, time\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\ntime.sleep(60)"
FAILED = """
import time
from mindspeed.problems import Problem, RunError
from mindspeed.engine.runtime.launch import leave_problems
leave_problems(RunError([Problem("MS606", "the loss is nan")]))
raise SystemExit(1)
"""


@pytest.mark.budget(10)
@pytest.mark.parametrize(
    ("program", "text"),
    [
        (
            KILLED,
            (
                "MS604 rank 1 was killed by SIGKILL; the other ranks were stopped\n"
                "  fix: if it was not killed on purpose, the machine may be out of memory; see its kernel log"
            ),
        ),
        pytest.param(FAILED, "MS606 the loss is nan", marks=pytest.mark.long),
    ],
)
def test_the_cause_of_an_end_is_told_once(program, text):
    with pytest.raises(RunError) as caught:
        launch([sys.executable, "-c", program], 2, {})
    assert str(caught.value) == text


def test_of_ranks_that_end_for_a_restart_the_one_that_says_why_is_told(monkeypatch, tmp_path):
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    said = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(said))
    leave_problems(RunError([Problem("MS620", "rank 1 hung")]))
    ends = {0: "<N/A>", 1: str(said)}

    def fail(arguments):
        failures = {rank: ProcessFailure(rank, 2**30, UNFINISHED, file) for rank, file in ends.items()}
        raise ChildFailedError("job", failures)

    monkeypatch.setattr(run, "run", fail)
    monkeypatch.setattr("mindspeed.engine.runtime.launch._end_orphans", lambda error: None)
    with pytest.raises(RunError, match="MS620 rank 1 hung"):
        launch([sys.executable, "-c", ""], 2, {})


def test_a_signal_while_other_nodes_are_told_of_a_lost_rank_ends_the_launcher(monkeypatch):
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def fail(arguments):
        raise ChildFailedError("job", {3: ProcessFailure(local_rank=0, pid=2**30, exitcode=3, error_file="<N/A>")})

    monkeypatch.setattr(run, "run", fail)
    monkeypatch.setattr("mindspeed.engine.runtime.launch._tell_other_nodes", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    where = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1"]
    assert launch(["job"], 1, {}, where) == 128 + signal.SIGTERM


@pytest.mark.long
def test_ranks_of_another_node_hear_of_a_rank_that_ends_before_it_has_a_plan(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os\nif os.environ.get('RANK') == '1':\n    os._exit(3)\n")
    (tmp_path / "job.py").write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "mindspeed", "run", "--platform", "cpu", "--nproc", "1", "--nnodes", "2"),
                *("--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port), "--", "job.py"),
            ],
            cwd=tmp_path,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in (0, 1)
    ]
    errors = [node.communicate(timeout=60)[1] for node in nodes]
    lost = "MS604 rank 1 ended with exit status 3; the other ranks were stopped"
    assert errors == [
        (
            f"MS612 rank 1 failed during the setup of the job: {lost}\n"
            f"  because: rank 1 runs on {socket.gethostname()}\n"
            "  fix: check the log of rank 1\n"
        ),
        f"{lost}\n",
    ]


def test_processes_get_their_rank_their_arguments_and_the_given_variables(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    program = "import os, sys; open(os.environ['OUT'] + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'] + sys.argv[1])"
    assert launch([sys.executable, "-c", program, "--run"], 2, {"OUT": str(tmp_path / "rank")}) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"rank0": "2--run", "rank1": "2--run"}
    assert signal.getsignal(signal.SIGINT) is before


SAVES = """
import signal, sys, time
from pathlib import Path
got = []
signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
Path(sys.argv[1], "ready").touch()
while not got:
    time.sleep(0.01)
Path(sys.argv[1], "saving").touch()
time.sleep(1)
Path(sys.argv[1], "saved").write_text(str(got))
"""


@pytest.mark.budget(10)
def test_only_the_first_signal_is_handed_on_and_later_ones_do_not_end_the_wait(tmp_path):
    program = [sys.executable, "-c", SAVES, str(tmp_path)]
    code = f"from mindspeed.engine.runtime.launch import launch; raise SystemExit(launch({program}, 1, {{}}))"
    launcher = subprocess.Popen([sys.executable, "-c", code])
    for name in ("ready", "saving"):
        while not (tmp_path / name).exists():
            assert launcher.poll() is None
            time.sleep(0.01)
        launcher.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait(timeout=60) == 128 + signal.SIGTERM
    assert (tmp_path / "saved").read_text() == "[15]"
