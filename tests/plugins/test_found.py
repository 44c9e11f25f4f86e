"""Features of other distributions, found in the metadata of what is on the import path."""

import subprocess
import sys
import zipfile

import pytest

from mindspeed.plugins.found import BUILT_IN, installed

METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n\nName: not this\n"


def put(folder, distribution, *entries, version="1.0", info="dist-info"):
    """Write the metadata of one distribution."""
    folder.mkdir(exist_ok=True)
    place = folder / f"{distribution.replace('-', '_')}-{version}.{info}"
    place.mkdir()
    (place / ("METADATA" if info == "dist-info" else "PKG-INFO")).write_text(METADATA.format(distribution, version))
    (place / "entry_points.txt").write_text(
        "\n".join(["[console_scripts]", "x = y:z", "[mindspeed.features]", *entries]) + "\n"
    )


@pytest.fixture
def found(monkeypatch):
    """A function that puts folders first on the import path and gives the rows of other distributions than mindspeed."""

    def rows(*folders):
        for folder in reversed(folders):
            monkeypatch.syspath_prepend(folder)
        return [(row.name, row.reference, row.distribution, row.version) for row in installed() if row.distribution != BUILT_IN]

    return rows


def test_names_are_those_of_the_metadata_and_values_are_references(found, tmp_path):
    put(tmp_path, "Acme-Clip", "acme-clip = acme.feature : Clip [extra]", "# off = acme:Off", "", version="1.2")
    assert found(tmp_path) == [("acme-clip", "acme.feature:Clip", "Acme-Clip", "1.2")]


def test_an_egg_info_folder_counts_as_well(found, tmp_path):
    put(tmp_path, "acme", "clip = acme:Clip", info="egg-info")
    assert found(tmp_path) == [("clip", "acme:Clip", "acme", "1.0")]


def test_the_first_of_two_distributions_of_one_name_counts(found, tmp_path):
    for folder, name in (("a", "Acme_Pack"), ("b", "acme-pack")):
        put(tmp_path / folder, name, f"{folder} = acme:Clip")
    assert [row[0] for row in found(tmp_path / "a", tmp_path / "b")] == ["a"]


def test_a_distribution_in_a_zip_file_is_found(found, tmp_path):
    with zipfile.ZipFile(tmp_path / "acme.zip", "w") as archive:
        archive.writestr("acme-1.0.dist-info/METADATA", METADATA.format("acme", "1.0"))
        archive.writestr("acme-1.0.dist-info/entry_points.txt", "[mindspeed.features]\nclip = acme:Clip\n")
    assert found(tmp_path / "acme.zip") == [("clip", "acme:Clip", "acme", "1.0")]


def test_what_cannot_be_read_holds_nothing(found, tmp_path):
    (tmp_path / "not_a_zip").write_text("text")
    (tmp_path / "empty-1.0.dist-info").mkdir()
    (tmp_path / "bare-1.0.dist-info").mkdir()
    (tmp_path / "bare-1.0.dist-info" / "entry_points.txt").write_text("[mindspeed.features]\nclip = acme:Clip\n")
    assert found(tmp_path / "missing", tmp_path / "not_a_zip", tmp_path) == []


def test_importing_the_package_for_authors_costs_nothing_until_a_name_is_wanted():
    source = (
        "import sys, mindspeed.plugins.found; assert 'pydantic' not in sys.modules; "
        "from mindspeed.plugins import *; assert Feature is sys.modules['mindspeed.plugins.feature'].Feature"
    )
    subprocess.run([sys.executable, "-c", source], check=True)
