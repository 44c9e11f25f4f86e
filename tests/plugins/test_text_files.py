import errno
from pathlib import Path

import pytest

from mindspeed.files.text_files import write_files
from mindspeed.problems import PlatformError


def test_folders_are_made_and_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_files({tmp_path / "a" / "b": "one", tmp_path / "link": "two"})
    assert ((tmp_path / "a" / "b").read_text(), (tmp_path / "real").read_text()) == ("one", "two")
    assert (tmp_path / "link").is_symlink()


def test_a_full_disk_leaves_every_old_file_as_it_was(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("old")
    write = Path.write_text

    def full_at_second(path, *arguments, **options):
        write(path, "half")
        if "second" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_at_second)
    with pytest.raises(PlatformError) as caught:
        write_files({first: "new", second: "new"}, fix="choose another -o DIR")
    assert str(caught.value) == (f"MS516 {second} cannot be written: No space left on device\n  fix: choose another -o DIR")
    assert first.read_text() == "old"
    assert list(tmp_path.iterdir()) == [first]


def test_a_place_below_a_file_is_a_problem(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlatformError, match=r"MS516 .*/file/x cannot be written: a part of its path is a file"):
        write_files({tmp_path / "file" / "x": ""})


def test_a_device_is_written_to_and_not_replaced():
    write_files({Path("/dev/null"): "gone"})
    assert not Path("/dev/null").is_file()
