"""Pictures of the documents: well-formed, described, and of what the code does."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from mindspeed.registry import catalog
from mindspeed.workbench.pictures.drawing import Picture, svg
from tools.docs.drawing import Arrow, Box, Mark, Matrix, Timeline
from tools.docs.figures import pictures_of
from tools.docs.plan_picture import REQUEST, plan_picture

SVG = "{http://www.w3.org/2000/svg}"
PICTURES = {picture.name: picture for name in catalog().usable for picture in pictures_of(name)}
PICTURES["plan"] = plan_picture()


def test_every_algorithm_of_context_parallelism_has_a_picture():
    algorithms = [name for name, spec in catalog().specs.items() if "context-parallel" in spec.slots]
    assert [name for name in algorithms if name not in PICTURES] == []
    assert "ring-attention-double" in PICTURES


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
def test_a_picture_is_well_formed_described_and_within_its_borders(picture):
    root = ElementTree.fromstring(svg(picture))
    assert root.get("role") == "img"
    assert (root.find(f"{SVG}title").text, root.find(f"{SVG}desc").text) == (picture.title, picture.text)
    assert root.get("aria-labelledby") == f"{picture.name}-title {picture.name}-text"
    width, height = int(root.get("width")), int(root.get("height"))
    assert width <= 1000
    for element in root.iter():
        if element.get("x"):
            assert int(element.get("x")) + int(element.get("width") or 0) <= width
            assert int(element.get("y")) + int(element.get("height") or 0) <= height


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
def test_an_arrow_of_a_picture_goes_forward_in_time_to_another_rank(picture):
    for timeline in (panel for row in picture.panels for panel in row if isinstance(panel, Timeline)):
        assert timeline.arrows or timeline.ranks == 1
        for arrow in timeline.arrows:
            assert arrow.begin[0] != arrow.end[0]
            assert arrow.begin[1] < arrow.end[1] < len(timeline.columns)


@pytest.mark.parametrize("name", ["ring-attention", "ring-attention-double"])
def test_an_arrow_of_a_ring_ends_where_its_block_is(name):
    (timeline,) = PICTURES[name].panels[-1]
    for arrow in timeline.arrows:
        assert timeline.boxes[arrow.begin].text == timeline.boxes[arrow.end].text
    for rank in range(4):
        assert sorted(timeline.boxes[rank, step].text for step in range(4)) == [f"keys {block}" for block in range(4)]


def test_style_has_every_class_and_both_backgrounds():
    text = svg(PICTURES["adaptive-cp-causal"])
    style = text[text.index("<style>") : text.index("</style>")]
    used = {name for names in re.findall(r'class="([a-z ]+)"', text) for name in names.split()} - {"near"}
    assert {name for name in used if f".{name} " not in style and f".{name}," not in style} == set()
    assert style.count(".page {") == 2


def test_the_same_values_give_the_same_text_and_text_is_escaped():
    panels = [[Matrix("a < b", ["r"], ["c"], {(0, 0): Mark("1", 9, cut=True)})]]
    panels += [[Timeline("t", ["x", "y"], {(0, 0): Box("&", 0)}, [Arrow((0, 0), (1, 1))], 2)]]
    texts = [svg(Picture("p", "<t>", "d", panels)) for _ in range(2)]
    assert all(one == other for one, other in pairwise(texts))
    assert '<title id="p-title">&lt;t&gt;</title>' in texts[0]
    assert ">a &lt; b</text>" in texts[0]
    assert ">&amp;</text>" in texts[0]


def test_the_picture_of_a_plan_has_what_is_requested_what_is_added_and_what_changes():
    ((flow,),) = PICTURES["plan"].panels
    requested, active, changes = (nodes for _, nodes in flow.columns)
    assert {node.text for node in requested} == set(REQUEST.features)
    assert {node.text for node in active} > {node.text for node in requested}
    assert all(node.note for node in active)
    assert {end for _, end in flow.edges if end[0] == 2} == {(2, row) for row in range(len(changes))}
