"""Nodes of a torchrun job on this machine, each an agent that a scheduler starts again when it fails."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

import psutil

FRESH: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it an agent whose rank was 0 once gives its ranks the address of its own store for ever."""
TORCHRUN: Final = Path(sys.executable).with_name("torchrun")


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def agent(port: int, command: list[str], nodes: str = "2") -> list[str]:
    """Return the command of torchrun for one of several nodes with a rank each."""
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job", "--max-restarts=20"]
    rendezvous += ["--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3", "--monitor-interval=0.5"]
    return [str(TORCHRUN), f"--nnodes={nodes}", "--nproc-per-node=1", *rendezvous, *command]


class Node:
    """A node: its agent, and the scheduler that starts the agent again."""

    def __init__(self, log: Path, command: list[str], **variables: str) -> None:
        left_out = ("MINDSPEED_", "SLURM_", "RANK", "WORLD_SIZE", "MASTER_", "PET_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        path = f"{TORCHRUN.parent}{os.pathsep}{os.environ['PATH']}"
        self.environ = kept | FRESH | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PATH": path} | variables
        self.command, self.log, self.starts = command, log, 0
        self._file: IO[str] = log.open("w")
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.agent = subprocess.Popen(self.command, env=self.environ, stdout=self._file, stderr=subprocess.STDOUT)

    def ranks(self) -> list[psutil.Process]:
        """Return the ranks that run on this node."""
        with suppress(psutil.Error):
            return [child for child in psutil.Process(self.agent.pid).children() if "RANK" in child.environ()]
        return []

    def lose(self) -> None:
        """Lose the whole node at once."""
        with suppress(psutil.Error):
            family = [psutil.Process(self.agent.pid), *psutil.Process(self.agent.pid).children(recursive=True)]
            for process in family:
                with suppress(psutil.Error):
                    process.kill()

    def restart(self) -> None:
        """Lose the node, and start its agent again."""
        self.lose()
        self.agent.wait()
        self.start()

    def look(self) -> bool:
        """Start the agent again if it has failed; return whether it has ended well."""
        status = self.agent.poll()
        if status not in (None, 0):
            self.start()
        return status == 0

    def end(self) -> str:
        """End what is left of the node, and return what it printed."""
        self.lose()
        self.agent.wait()
        self._file.close()
        return self.log.read_text()
