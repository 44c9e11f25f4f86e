from mindspeed.plugins.discovery import discover
from tests.plugins.synthetic import catalog, make

UNREADABLE = """
from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, Field
class Clock:
    pass
class AcmeArgs(FeatureArgs):
    clock: Clock = Field(default=Clock(), description="a clock")
class Acme(Feature[AcmeArgs]):
    spec = FeatureSpec("acme-clip", Category.TOOL)
"""
GOOD = """
from mindspeed.plugins import Category, Feature, FeatureSpec
class Acme(Feature):
    spec = FeatureSpec("{name}", Category.TOOL)
"""


def row(catalog, name):
    return [row for row in catalog.rows if row.name == name]


def test_a_third_party_is_found_with_its_distribution_and_version(install):
    install("acme", "acme-clip", GOOD.format(name="acme-clip"))
    (found,) = row(discover(), "acme-clip")
    assert (found.distribution, found.version, found.state) == ("acme", "1.2", "ok")


def test_metadata_alone_lists_it_without_importing(install):
    install("acme", "acme-clip", "raise SystemExit('imported')")
    (found,) = row(discover(only=()), "acme-clip")
    assert (found.distribution, found.version, found.state) == ("acme", "1.2", "not loaded")


def test_a_plugin_that_fails_to_import_is_a_row(install):
    install("acme", "acme-clip", "import no_such_module")
    known = discover()
    (found,) = row(known, "acme-clip")
    assert found.state == "broken"
    assert str(found.problem) == (
        "MS101 feature acme-clip cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'\n"
        "  where: acme 1.2, acme_features:Acme\n"
        "  fix: fix or uninstall acme"
    )
    assert "tensor-parallel" in known.usable


def test_settings_of_a_type_that_nothing_can_read_are_a_row(install):
    install("acme", "acme-clip", UNREADABLE)
    (found,) = row(discover(), "acme-clip")
    assert (found.state, found.problem.code) == ("broken", "MS101")
    assert found.problem.message.startswith(
        "feature acme-clip cannot be loaded: PydanticSchemaGenerationError: "
        "Unable to generate pydantic-core schema for <class 'acme_features.Clock'>."
    )


def test_a_name_that_differs_from_the_entry_point_is_refused(install):
    install("acme", "acme-clip", GOOD.format(name="acme-clamp"))
    (found,) = row(discover(), "acme-clip")
    assert found.problem.code == "MS104"
    assert found.problem.message == (
        "the folder or entry point acme-clip and spec.name acme-clamp of a feature differ; they must be equal"
    )


def test_two_distributions_with_one_name_are_both_refused(install):
    install("acme", "clip", GOOD.format(name="clip"))
    install("bolt", "clip", GOOD.format(name="clip"))
    known = discover()
    assert "clip" not in known.usable
    text = "several packages provide the feature clip: acme 1.2 and bolt 1.2"
    assert [found.problem.message for found in row(known, "clip")] == [text, text]


def test_a_built_in_name_cannot_be_shadowed(install):
    install("acme", "tensor-parallel", GOOD.format(name="tensor-parallel"))
    known = discover()
    assert known.usable["tensor-parallel"].distribution == "mindspeed"
    assert [found.problem.code for found in row(known, "tensor-parallel") if found.problem] == ["MS102"]


def test_near_names_forgive_underscores_and_capitals():
    assert catalog(make("tensor-parallel"), make("swiglu")).near("Tensor_Parallell") == ["tensor-parallel"]
