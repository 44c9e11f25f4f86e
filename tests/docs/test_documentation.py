"""What the documents say is what the code is."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from mindspeed import ops
from mindspeed.engine.inspection.sites import find_site
from mindspeed.engine.resolution.environment import SUPPORTED_MEGATRON, made_up, version_in
from mindspeed.engine.resolution.request import JOB_KEYS, Layer
from mindspeed.engine.resolution.resolver import resolve
from mindspeed.engine.resolution.variables import variables
from mindspeed.plugins import FeatureSpec, World
from mindspeed.plugins.discovery import BUILT_IN, Catalog, DiscoveredFeature
from mindspeed.problems import error_codes
from mindspeed.registry import catalog
from mindspeed.workbench.diagnostics import support_matrix
from mindspeed.workbench.pages import chinese
from mindspeed.workbench.pages.features import feature_page
from mindspeed.workbench.pages.operators import forward_only
from mindspeed.workbench.pages.reference import JOB_FILE, REFERENCE
from tests import transcripts
from tools.docs import site

ROOT = Path(__file__).resolve().parents[2]
FEATURES = sorted(row.name for row in catalog().rows if row.distribution == BUILT_IN)


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_feature_in_the_readme_resolves_and_patches_what_the_example_package_patches():
    (shown,) = re.findall(r"```python\n(from mindspeed import plugins.*?)```", read("README.md"), re.DOTALL)
    assert sum(bool(line.strip()) for line in shown.splitlines()) == 8
    made = {"__name__": "acme_mindspeed.feature"}
    exec(shown, made)
    feature = made["ZLoss"]
    (patch,) = feature(feature.Args(), World({})).patches()
    assert find_site(patch.target) is not None
    example = read("examples/third_party_feature/acme_mindspeed/feature.py")
    assert patch.target in example
    assert f'"{patch.value}"' in example
    known = Catalog([DiscoveredFeature("acme-z-loss", "acme", "0.1.0", "acme_mindspeed.feature:ZLoss", feature)])
    assert resolve([Layer("test", ("acme-z-loss",))], known, made_up("cpu", "0.16.1")).problems == []


def test_the_readme_is_short_and_names_what_it_was_not_run_on():
    lines = read("README.md").splitlines()
    assert len(lines) <= 120
    assert "It has not run on an NPU or a GPU." in "\n".join(lines[:8])
    assert "import mindspeed.megatron_adaptor" in lines


@pytest.mark.parametrize(
    "row", re.findall(r"^\| \[([\w-]+)\]\(mindspeed/features/\S+\) \| (.*?) \|", read("README.md"), re.MULTILINE)
)
def test_a_measured_effect_of_the_readme_stands_on_the_page_of_the_feature(row):
    name, effect = row
    page = read(f"mindspeed/features/{name.replace('-', '_')}/README.md")
    for number in re.findall(r"\d[\d,.]*", effect):
        assert number in page, (name, number)


def test_the_feature_in_the_guide_is_one_that_resolves():
    source, *_ = re.findall(r"```python\n(.*?)```", read("docs/writing-a-feature.md"), re.DOTALL)
    made = {"__name__": "acme_clip.feature"}
    exec(source, made)
    feature = made["AcmeClip"]
    (patch,) = feature(feature.Args(), World({})).patches()
    assert find_site(patch.target) is not None
    known = Catalog([DiscoveredFeature("acme-clip", "acme-clip", "0.1.0", "acme_clip.feature:AcmeClip", feature)])
    asked = Layer("test", ("acme-clip",), {"acme-clip": {"limit": 5}}, {"vocab_size": 50000})
    (problem,) = resolve([asked], known, made_up("cpu", "0.16.1")).problems
    text = "acme-clip: with limit=5.0 no token of 50000 can reach a probability of 1/2"
    assert (problem.message, problem.fix_text) == (text, "--set acme-clip.limit=30")
    assert f"MS304 {text}" in read("docs/writing-a-feature.md")


@pytest.mark.parametrize(("page", "count"), [("README.md", 3), ("docs/first-run.md", 2)])
def test_the_transcripts_of_the_first_pages_are_filled(page, count):
    blocks = re.findall(r"<!-- transcript: .*? -->\n```\n(.*?)```", read(page), re.DOTALL)
    assert len(blocks) == count
    assert all(len(block.splitlines()) > 3 for block in blocks)


def test_the_first_screen_of_the_readme_names_the_two_commands_and_the_way_to_the_command():
    screen = read("README.md").splitlines()[:22]
    assert [line.split("#")[0].strip() for line in screen if line.startswith("make ")] == ["make train", "make test"]
    assert ". .venv/bin/activate" in "\n".join(screen)


def test_an_operator_is_forward_only_when_its_definition_says_so():
    assert {"ffn", "quant_gmm", "lcal_coc", "npu_ring_attention_update"} <= set(forward_only())
    assert not {"rms_norm", "swiglu", "fusion_attention", "npu_matmul_add_fp32"} & set(forward_only())


@pytest.mark.parametrize("file", transcripts.documents(), ids=lambda file: file.name)
def test_a_document_shows_what_commands_print_now(file):
    text = file.read_text(encoding="utf-8")
    assert text == transcripts.refreshed(text), "run: make docs"
    assert str(ROOT) not in text, "a command that prints paths of this machine is no transcript"


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_has_a_page_with_its_claim_and_measured_effects(name):
    folder = name.replace("-", "_")
    page = read(f"mindspeed/features/{folder}/README.md")
    assert page.startswith(f"# {name}\n")
    assert catalog().feature(name).spec.numerics.claim in page.lower()
    assert f"mindspeed features verify {name}" in page
    assert "](../" not in page, "a page of the site has no neighbours in folders: write the name"
    assert (ROOT / "tests" / "features" / folder).is_dir()


@pytest.mark.parametrize("name", FEATURES)
def test_every_argument_of_a_feature_is_described(name):
    assert all(field.description for field in catalog().feature(name).Args.model_fields.values())


def test_every_code_that_is_raised_is_explained_and_every_explained_code_is_raised():
    used = set()
    for file in (ROOT / "mindspeed").rglob("*.py"):
        used |= set(re.findall(r'"(MS\d{3})"', file.read_text(encoding="utf-8")))
    assert used == set(error_codes())


SHAPE = [
    "When to use it",
    "Usage",
    "In your own trainer",
    "How it works",
    "Settings",
    "Works with, needs and refuses",
    "Numerics",
    "Measured effect",
    "Limits",
    "For developers",
]


@pytest.mark.guards(27)
@pytest.mark.parametrize("name", FEATURES)
def test_the_page_of_a_feature_has_the_shape_of_all_and_every_constraint(name):
    (row,) = [row for row in catalog().rows if row.name == name]
    page = feature_page(row, {}, {})
    titles = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert titles == [title for title in SHAPE if title in titles]
    assert {"Usage", "How it works", "Settings", "Numerics", "Measured effect", "For developers"} <= set(titles)
    (stated,) = re.findall(r"^## Works with, needs and refuses\n\n(.*?)^##", page, re.MULTILINE | re.DOTALL)
    assert stated.count("\n- ") + stated.startswith("- ") == len(row.feature.spec.constraints)
    assert "<lambda>" not in page


def documents():
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "mindspeed").rglob("*.md")])


@pytest.mark.parametrize("file", documents(), ids=lambda file: str(file.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(file):
    text = re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (file.parent / path).resolve() if path else file
        if not target.exists() or (anchor and (target.suffix != ".md" or anchor not in anchors(target))):
            broken.append(link)
    assert broken == []


def anchors(file):
    """The anchors of a page's headings, as forges make them."""
    titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_no_page_that_a_program_makes_is_in_the_tree():
    made = {f"{name}.md" for name in site.MADE} | {
        *chinese.PAGES.values(),
        "matrix.html",
        "matrix.json",
        "plan.svg",
        "effects.svg",
    }
    assert [name for name in made if (ROOT / "docs" / name).exists()] == []


def test_every_page_can_be_reached_from_the_index():
    seen, queue = set(), [ROOT / "docs" / "index.md"]
    while queue:
        page = queue.pop()
        if page in seen:
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
        queue += [target for link in links if (target := (page.parent / link).resolve()).suffix == ".md" and target.exists()]
    assert set((ROOT / "docs").glob("*.md")) - seen == set()


@pytest.mark.parametrize("file", sorted((ROOT / "docs").glob("*.md")), ids=lambda file: file.name)
def test_pages_are_in_english(file):
    text = file.read_text(encoding="utf-8")
    assert file.read_text(encoding="utf-8").startswith("# ")
    assert [letter for letter in text if "\u2e80" <= letter <= "\uffef"] == []


def test_every_environment_variable_is_on_the_page_of_settings():
    read_somewhere = set()
    for file in (ROOT / "mindspeed").rglob("*.py"):
        if file.name != "variables.py":
            read_somewhere |= set(re.findall(r"\"(MINDSPEED_[A-Z_]+)\"", file.read_text(encoding="utf-8")))
    assert variables().keys() == read_somewhere
    page = REFERENCE["environment-variables"].text(catalog())
    assert all(f"| `{name}` |" in page for name in read_somewhere)
    assert JOB_FILE.keys() == set(JOB_KEYS)


@pytest.mark.parametrize("file", documents(), ids=lambda file: str(file.relative_to(ROOT)))
def test_no_document_shows_a_function_without_a_name(file):
    assert "<lambda>" not in file.read_text(encoding="utf-8")


def test_every_operator_is_on_the_page_with_its_call():
    page = REFERENCE["operators"].text(catalog())
    for name in (*ops.OPERATORS, *ops.ALIASES):
        assert f"\n## {name}\n" in page
    assert "```python\nswiglu(x: Tensor, dim: int=-1) -> Tensor\n```" in page
    assert "- `mindspeed::swiglu(Tensor x, int dim) -> Tensor`" in page


@pytest.mark.guards(7)
def test_the_support_matrix_agrees_with_what_the_resolver_accepts():
    ran = ("tested", "tested, long")
    for cell in support_matrix.CELLS:
        if cell.component == "megatron-core":
            assert version_in(cell.version, SUPPORTED_MEGATRON) == (cell.state in ran), cell
    assert {row.megatron for row in support_matrix.COMBINATIONS if row.state in ran} == {
        cell.version for cell in support_matrix.CELLS if cell.component == "megatron-core" and cell.state in ran
    }
    pinned = dict(line.split("==") for line in read("constraints.txt").splitlines() if "==" in line)
    assert [cell.version for cell in support_matrix.CELLS if cell.component == "torch" and cell.state in ran] == [
        pinned.get("torch", "2.13.0")
    ]
    assert {row.platform for row in support_matrix.COMBINATIONS if row.state in ran} == {"cpu"}


def test_the_guide_has_every_field_of_a_declaration_and_every_constraint():
    text = read("docs/writing-a-feature.md")
    named = set(re.findall(r"`(\w+)", text))
    assert {field.name for field in fields(FeatureSpec)} - named == set()
    assert len(fields(FeatureSpec)) <= 18
    constraints = {"Requires", "RequiresAny", "RequiresSlot", "Conflicts", "After", "Before", "ModelCondition"}
    assert constraints - named == set()
    assert "`@condition(" in text
    assert "CheckpointState(" in text
