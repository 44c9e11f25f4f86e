"""What several processes need is made by one of them."""

import threading
from concurrent.futures import ThreadPoolExecutor

from mindspeed.files.made_once import make_once


def test_the_first_makes_it_and_the_others_wait(tmp_path):
    path, calls, begun = tmp_path / "new" / "made", [], threading.Barrier(4)

    def make():
        calls.append(1)
        path.touch()

    def ask(_):
        begun.wait()
        make_once(path, path.exists, make)
        return path.exists()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(4)))
    assert len(calls) == 1


def test_what_failed_is_made_by_the_next(tmp_path):
    path = tmp_path / "made"

    def fail():
        raise ValueError

    try:
        make_once(path, path.exists, fail)
    except ValueError:
        make_once(path, path.exists, path.touch)
    assert path.exists()
