"""The site: every page is in its navigation, it builds strictly, and it works in a browser without a network."""

import functools
import http.server
import re
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from mindspeed.plugins.discovery import discover
from mindspeed.workbench.pages import chinese
from tests.docs.browser import MISSING, Browser, browser
from tools.docs.effects_picture import effects_picture, share_of
from tools.docs.site import MADE, guides, relinked, settings, texts

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"


def navigation(entries=None) -> list[str]:
    """Every page that the navigation of the site names."""
    if entries is None:
        entries = yaml.safe_load(settings(discover(only=()), ROOT / "build" / "pages"))["nav"]
    values = [value for entry in entries for value in entry.values()]
    return [page for value in values for page in (navigation(value) if isinstance(value, list) else [value])]


def test_the_navigation_has_every_guide_and_no_page_twice():
    pages = navigation()
    found = {*guides(discover(only=())), *(f"{name}.md" for name in MADE), *chinese.PAGES.values()}
    assert {name for name in found if not name.startswith("examples/")} - set(pages) == set()
    assert len(pages) == len(set(pages))


def test_the_settings_of_the_site_inherit_those_of_the_repository_and_list_features_by_category(tmp_path):
    catalog = discover(only=())
    made = yaml.safe_load(settings(catalog, tmp_path / "pages"))
    assert (tmp_path / made["INHERIT"]).resolve() == ROOT / "mkdocs.yml"
    assert (made["docs_dir"], made["site_dir"]) == ("pages", "site")
    (tab,) = (entry["Features"] for entry in made["nav"] if "Features" in entry)
    (group,) = (entry["context-parallel"] for entry in tab if "context-parallel" in entry)
    assert {"ring-attention": "features/ring-attention.md"} in group
    assert {f"features/{name}.md" for name in catalog.usable} - set(navigation()) == set()


def test_the_first_page_has_a_bar_for_each_measured_effect():
    page = guides(discover(only=()))["index.md"]
    ((panel,),) = effects_picture(page).panels
    assert [name for name, *_ in panel.rows] == re.findall(r"^\| \[([a-z-]+)\]\(features/", page, re.MULTILINE)
    assert [share_of(text) for text in ("0.64 of the time", "1 % of the time", "1,500 instead of 2,000 bytes")] == [
        0.64,
        0.01,
        0.75,
    ]
    with pytest.raises(ValueError, match="no share in 'faster'"):
        share_of("faster")
    assert page.index("effects.svg") < page.index("## Start") < page.index("plan.svg")


def test_links_of_a_page_lead_to_the_new_places_and_code_is_left_alone():
    text = (
        "[a](../CHANGELOG.md#top) [b](../mindspeed/job/fields.py#world) [c](https://x.y/z)\n```\n[d](../CHANGELOG.md)\n```\n"
        "[e](../mindspeed/features/coc/README.md) [f](zh/translations.yaml)\n"
    )
    assert relinked(text, ROOT / "docs" / "install.md", "install.md") == (
        "[a](changelog.md#top) [b](settings.md#world) [c](https://x.y/z)\n```\n[d](../CHANGELOG.md)\n```\n"
        "[e](features/coc.md) [f](zh/index.md)\n"
    )
    with pytest.raises(ValueError, match=r"a page links to pyproject.toml, which is not in the site"):
        relinked("[a](../pyproject.toml)", ROOT / "docs" / "install.md", "install.md")


@pytest.mark.budget(8)
def test_every_page_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr("tools.docs.site.MATRIX", tmp_path)
    catalog = discover(only=())
    made = texts(catalog)
    assert set(navigation()) - made.keys() == set()
    assert {f"features/{name}.md" for name in catalog.usable} - made.keys() == set()
    assert "![Ring attention of four ranks](ring-attention.svg)" in made["features/ring-attention.md"]
    assert made["features/ring-attention.svg"].startswith("<svg")
    assert "](plan.svg)" in made["index.md"]
    assert "0.64 of the time of a ring without the zig-zag order" in made["effects.svg"]
    assert "| <a id=" in made["moving-from-mindspeed.md"]
    assert '"cases":[]' in made["matrix.html"]


class Page(HTMLParser):
    """Links, anchors and loaded files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {values[key] for key in ("id", "name") if values.get(key)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag in ("script", "img", "iframe") and values.get("src"):
            self.loaded.append(values["src"])
        if tag == "link" and "stylesheet" in (values.get("rel") or ""):
            self.loaded.append(values["href"])


@pytest.fixture(scope="module")
def site() -> Path:
    done = subprocess.run(["make", "site"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return SITE


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator[Browser]:
    if MISSING:
        pytest.skip(f"{' and '.join(MISSING)} not found: apt-get install chromium chromium-driver")
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.mark.long
def test_no_link_of_the_site_is_broken_and_nothing_is_loaded_from_elsewhere(site):
    pages = {file: Page(file.read_text(encoding="utf-8")) for file in site.rglob("*.html") if file.name != "404.html"}
    assert len(pages) > 100
    broken, foreign = [], []
    for file, page in pages.items():
        foreign += [(file.name, source) for source in page.loaded if "//" in source]
        for link in page.links:
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", path):
                continue
            target = (file.parent / path).resolve() if path else file
            known = pages.get(target)
            if not target.exists() or (anchor and known and anchor not in known.anchors and anchor != "__tabbed"):
                broken.append((str(file.relative_to(site)), link))
    assert (broken, foreign) == ([], [])


WANTED = {
    "throughput": "going-faster.html",
    "gradient checkpointing": "glossary.html",
    "sequence packing": "glossary.html",
    "kubernetes": "kubernetes.html",
    "out of memory": "failures.html",
    "flash attention": "features/flash-attention.html",
}
SEARCH = """
const field = document.querySelector("[data-md-component=search-query]");
if (field.value !== arguments[0]) {
  field.focus();
  field.value = arguments[0];
  field.dispatchEvent(new Event("keyup", {bubbles: true}));
}
const found = Array.from(document.querySelectorAll(".md-search-result__link"), (link) => link.getAttribute("href"));
return found.some((href) => href.includes(arguments[1])) && found;
"""


@pytest.mark.long
@pytest.mark.parametrize(("words", "page"), WANTED.items(), ids=WANTED)
def test_the_search_finds(chromium, address, words, page):
    chromium.open(f"{address}/index.html")
    assert chromium.wait(SEARCH, words, page)


@pytest.mark.long
def test_every_page_of_the_navigation_can_be_read_at_400_pixels(chromium, address):
    chromium.command("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=True)
    wide = {}
    for page in [page.replace(".md", ".html") for page in navigation() if page.endswith(".md")]:
        chromium.open(f"{address}/{page}")
        width = chromium.run("return document.scrollingElement.scrollWidth")
        if width > 400:
            wide[page] = width
    chromium.command("Emulation.clearDeviceMetricsOverride")
    assert wide == {}


COLOURS = """
const light = (colour) => {
  const [r, g, b] = colour.match(/[0-9.]+/g).map(Number);
  return (0.3 * r + 0.6 * g + 0.1 * b) / 255;
};
const text = document.querySelector("article p");
return [light(getComputedStyle(document.body).backgroundColor), light(getComputedStyle(text).color)];
"""


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_schemes(chromium, address, scheme):
    chromium.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    chromium.open(f"{address}/install.html")
    chromium.run("localStorage.clear()")  # the scheme that an earlier page kept
    chromium.open(f"{address}/install.html")
    background, text = chromium.run(COLOURS)
    assert (background > 0.5) == (scheme == "light")
    assert abs(background - text) > 0.5


@pytest.mark.long
def test_the_filters_of_the_features_leave_the_rows_that_match(chromium, address):
    chromium.open(f"{address}/features/index.html")
    count = "return Array.from(document.querySelectorAll('article tbody tr')).filter((row) => !row.hidden).length"
    choose = "const c = document.querySelector(`.feature-filters [aria-label=${arguments[0]}]`); c.value = arguments[1];"
    choose += "c.dispatchEvent(new Event('input', {bubbles: true}));"
    everything = chromium.run(count)
    assert everything > 60
    chromium.run(choose, "category", "context-parallel")
    assert chromium.run(count) == 6
    chromium.run(choose, "words", "ring")
    assert 0 < chromium.run(count) < 6
    chromium.run(choose, "words", "")
    chromium.run(choose, "category", "")
    assert chromium.run(count) == everything
