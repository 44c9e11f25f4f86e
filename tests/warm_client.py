"""``python`` of a command line that `tests.warm_processes` gives: the first argument is the address of its server.

A script with few imports, for it starts with every process.
"""

import json
import os
import signal
import socket
import sys

_HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def main(address: str, *words: str) -> None:
    """Have the server run ``words`` with the output, folder and variables of this process, and end as that ends."""
    message = {"words": words, "folder": os.getcwd(), "variables": dict(os.environ), "parent": os.getppid()}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [b"\n"], (0, 1, 2))
        server.sendall(json.dumps(message).encode() + b"\n")
        answers = server.makefile()
        process = int(answers.readline())
        for number in _HANDED_ON:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, _: os.kill(process, number))
        status = int(answers.readline())
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
