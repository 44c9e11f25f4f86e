"""Entry points read from metadata folders, and the index that remembers large folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib import metadata

import pytest

from mindspeed.plugins.entry_points import EntryPoint, cache_folder, entry_points

GROUP = "mindspeed.features"
LONG_AGO = 1_000_000_000


def put(folder, distribution, *entries, version="1.0", info="dist-info"):
    """Write the metadata of one distribution."""
    place = folder / f"{distribution.replace('-', '_')}-{version}.{info}"
    place.mkdir()
    name = "METADATA" if info == "dist-info" else "PKG-INFO"
    (place / name).write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n\nName: not this\n")
    (place / "entry_points.txt").write_text("\n".join(["[console_scripts]", "x = y:z", f"[{GROUP}]", *entries]) + "\n")
    return place


@pytest.fixture
def many(tmp_path, monkeypatch):
    """A folder with 150 distributions that has not changed for long, and an index of its own."""
    monkeypatch.setenv("MINDSPEED_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(150):
        put(folder, f"pack-{number}", f"pack-{number} = pack_{number}:Pack")
    os.utime(folder, (LONG_AGO, LONG_AGO))
    return folder


def test_names_are_those_of_the_metadata_and_values_are_references(tmp_path):
    put(tmp_path, "Acme-Clip", "acme-clip = acme.feature : Clip [extra]", "# off = acme:Off", "", version="1.2")
    assert entry_points(GROUP, [str(tmp_path)]) == [EntryPoint("acme-clip", "acme.feature:Clip", "Acme-Clip", "1.2")]


def test_an_egg_info_folder_counts_as_well(tmp_path):
    put(tmp_path, "acme", "clip = acme:Clip", info="egg-info")
    assert entry_points(GROUP, [str(tmp_path)]) == [EntryPoint("clip", "acme:Clip", "acme", "1.0")]


def test_the_first_of_two_distributions_of_one_name_counts(tmp_path):
    for folder, name in (("a", "Acme_Pack"), ("b", "acme-pack")):
        (tmp_path / folder).mkdir()
        put(tmp_path / folder, name, f"{folder} = acme:Clip")
    assert [entry.name for entry in entry_points(GROUP, [str(tmp_path / "a"), str(tmp_path / "b")])] == ["a"]


def test_a_distribution_in_a_zip_file_is_found(tmp_path):
    with zipfile.ZipFile(tmp_path / "acme.zip", "w") as archive:
        archive.writestr("acme-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
        archive.writestr("acme-1.0.dist-info/entry_points.txt", f"[{GROUP}]\nclip = acme:Clip\n")
    assert entry_points(GROUP, [str(tmp_path / "acme.zip")]) == [EntryPoint("clip", "acme:Clip", "acme", "1.0")]


def test_what_cannot_be_read_holds_nothing(tmp_path):
    (tmp_path / "not_a_zip").write_text("text")
    (tmp_path / "empty-1.0.dist-info").mkdir()
    assert entry_points(GROUP, [str(tmp_path / "missing"), str(tmp_path / "not_a_zip"), str(tmp_path)]) == []


@pytest.mark.parametrize("group", ["console_scripts", "pytest11"])
def test_the_standard_library_finds_the_same_here(group):
    ours = {(entry.name, entry.reference) for entry in entry_points(group)}
    assert ours == {(entry.name, entry.value.partition("[")[0].strip()) for entry in metadata.entry_points(group=group)}


def test_a_large_folder_is_remembered_until_it_changes(many):
    found = entry_points(GROUP, [str(many)])
    assert len(found) == 150
    (file,) = cache_folder().glob("entry_points/*.json")
    data = json.loads(file.read_text())
    data["entries"] = data["entries"][:1]
    file.write_text(json.dumps(data))
    assert entry_points(GROUP, [str(many)]) == [EntryPoint(*data["entries"][0])], "it is read from the index"
    put(many, "acme", "clip = acme:Clip")
    assert len(entry_points(GROUP, [str(many)])) == 151


def test_a_folder_that_has_just_changed_is_not_remembered(many):
    os.utime(many)
    entry_points(GROUP, [str(many)])
    assert not cache_folder().exists()


def test_an_egg_info_folder_keeps_its_neighbours_from_being_remembered(many):
    put(many, "acme", "clip = acme:Clip", info="egg-info")
    os.utime(many, (LONG_AGO, LONG_AGO))
    entry_points(GROUP, [str(many)])
    assert not cache_folder().exists()


@pytest.mark.parametrize("damage", ["", "{", '{"format": 1}', "[]", '{"format": 0}'])
def test_a_damaged_index_is_made_again(many, damage):
    expected = entry_points(GROUP, [str(many)])
    (file,) = cache_folder().glob("entry_points/*.json")
    good = file.read_text()
    file.write_text(damage)
    assert entry_points(GROUP, [str(many)]) == expected
    assert file.read_text() == good


def test_without_a_place_for_the_index_all_is_found(many, monkeypatch):
    monkeypatch.setenv("MINDSPEED_CACHE", "/dev/null/nowhere")
    assert len(entry_points(GROUP, [str(many)])) == 150


READ = """
import sys
from mindspeed.plugins.entry_points import entry_points
print(len(entry_points("mindspeed.features", [sys.argv[1]])))
"""


def test_processes_that_write_the_index_at_once_all_find_everything(many):
    started = [subprocess.Popen([sys.executable, "-c", READ, str(many)], stdout=subprocess.PIPE, text=True) for _ in range(8)]
    assert [process.communicate()[0] for process in started] == ["150\n"] * 8
    assert len(list(cache_folder().glob("entry_points/*"))) == 1


def test_importing_the_package_for_authors_costs_nothing_until_a_name_is_wanted():
    source = (
        "import sys, mindspeed.plugins.found; assert 'pydantic' not in sys.modules; "
        "from mindspeed.plugins import *; assert Feature is sys.modules['mindspeed.plugins.feature'].Feature"
    )
    subprocess.run([sys.executable, "-c", source], check=True)
