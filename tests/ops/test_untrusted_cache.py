"""A library that another user could have put into the cache is not loaded, and neither is an object of one linked."""

import json
import os
import shutil

import pytest

from mindspeed.ops import build_cache
from mindspeed.ops.building import build
from mindspeed.problems import PlatformError
from tests.ops.built import pretend_built, run

NOTHING = "; nothing is loaded from there"
LOAD = "import mindspeed.ops.rms_norm"


@pytest.fixture
def built(sources, cache):
    return pretend_built(cache, sources)


def refusal(built, cache):
    assert build_cache.find(built.key, cache) is None
    problem = build_cache.not_trusted(built.key, cache)
    assert problem.code == "MS518"
    return problem.message.removesuffix(NOTHING), problem.fix_text


def test_folders_of_the_cache_are_for_their_user_alone(built, cache):
    made = [cache, *cache.rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert build_cache.find(built.key, cache) == built
    assert build_cache.not_trusted(built.key, cache) is None


@pytest.mark.parametrize("name", ["../../../evil/x.so", "/tmp/x.so", "..", "", 3])
def test_a_record_names_a_file_beside_it(built, cache, name):
    record = build_cache.record_of(built.library)
    record.write_text(json.dumps(json.loads(record.read_text()) | {"library": name}))
    assert refusal(built, cache) == (f"{record} names {name!r}, which is not a file in the same folder", f"rm {record}")


@pytest.mark.parametrize("part", ["cache", "ops", "folder", "record", "library"])
@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_what_others_can_write_is_not_loaded(built, cache, part, mode):
    record = build_cache.record_of(built.library)
    parts = {"cache": cache, "ops": cache / "ops", "folder": record.parent, "record": record, "library": built.library}
    path = parts[part]
    path.chmod(mode)
    text, fix = f"{path} is writable for other users (mode {mode:04o})", f"chmod -R go-w {path}, if its contents are trusted"
    assert refusal(built, cache) == (text, fix)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("part", ["folder", "record", "library"])
def test_what_belongs_to_another_user_is_not_loaded(built, cache, part):
    record = build_cache.record_of(built.library)
    path = {"folder": record.parent, "record": record, "library": built.library}[part]
    os.chown(path, 65534, 65534)
    text = f"{path} belongs to user 65534, who is neither the current user nor root"
    assert refusal(built, cache) == (text, f"rm -r {path}, or MINDSPEED_CACHE=FOLDER with a folder of the current user")


def test_links_are_not_followed_out_of_the_cache(built, cache, tmp_path):
    folder = built.library.parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert refusal(built, cache) == (f"{folder} is a symbolic link", f"rm {folder}")


def test_a_cache_that_its_user_reaches_by_a_link_is_one(built, cache, tmp_path):
    (tmp_path / "link").symlink_to(cache)
    assert build_cache.find(built.key, tmp_path / "link") is not None


def test_a_process_says_so_and_runs_the_references(built, sources, cache):
    built.library.parent.chmod(0o777)
    done = run(LOAD, cache, sources)
    assert done.returncode == 0
    text = f"MS518 {built.library.parent} is writable for other users (mode 0777){NOTHING}\n  fix: chmod -R go-w "
    assert text in done.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="this machine has no g++")
def test_nothing_is_built_where_others_can_write(sources, cache):
    objects = build_cache.objects(cache)
    objects.mkdir(parents=True)
    objects.chmod(0o777)
    with pytest.raises(PlatformError) as error:
        build(print, sources=sources, cache=cache)
    assert str(error.value).startswith(f"MS518 {objects} is writable for other users (mode 0777){NOTHING}")
