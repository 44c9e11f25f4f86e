import os

from mindspeed.engine.inspection.source import Module, read_text
from mindspeed.engine.inspection.source_cache import SourceCache
from mindspeed.files.cache_folder import CACHE_VARIABLE, remove_oldest


def test_the_least_recently_written_files_are_removed(tmp_path):
    files = [tmp_path / name for name in "abcd"]
    for time, file in enumerate(files):
        file.touch()
        os.utime(file, (time, time))
    remove_oldest(tmp_path.iterdir(), 3)
    assert sorted(tmp_path.iterdir()) == files[1:]
    remove_oldest(tmp_path.iterdir(), 3)
    assert sorted(tmp_path.iterdir()) == files[1:]


def test_files_of_many_megatrons_do_not_pile_up(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    module = Module("source", str(tmp_path / "source.py"), None)
    (tmp_path / "source.py").write_text("value = 1\n")
    for number in range(25):
        cache = SourceCache([tmp_path / str(number)])
        cache.get("name", lambda: read_text(module).decode())
        cache.save()
    assert len([*(tmp_path / "cache").glob("megatron-*.json")]) == 20
