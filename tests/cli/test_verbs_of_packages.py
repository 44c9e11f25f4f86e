"""A package adds a verb by an entry point; one that cannot be imported costs its own verb alone."""

import subprocess
import sys

import pytest

from mindspeed.plugins.extensions import extensions

WORKS = '''
import click

@click.command()
@click.argument("name")
def greet(name):
    """Greet somebody."""
    click.echo(f"hello {name}")
'''
ROW = "  {verb}  MS{code}: not available ({providers})\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a distribution with a verb, and remove it after the test."""

    def install(distribution, verb, source, attribute):
        module = f"{distribution}_verbs"
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{distribution}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[mindspeed.verbs]\n{verb} = {module}:{attribute}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)
        extensions.cache_clear()

    monkeypatch.syspath_prepend(str(tmp_path))
    yield install
    extensions.cache_clear()


def test_a_verb_of_a_package_is_in_the_help_and_runs(mindspeed, package):
    package("acme", "greet", WORKS, "greet")
    help_text = mindspeed("--help").stdout
    assert help_text.endswith("Commands of other packages:\n  greet  Greet somebody.\n")
    assert mindspeed("greet", "world").stdout == "hello world\n"
    assert mindspeed("gret").stderr.endswith("Error: no such command 'gret'; did you mean greet?\n")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nowhere_to_be_found", "cannot be imported: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("greet = 3", "is no command of click, but a int"),
    ],
)
def test_a_package_that_cannot_be_imported_is_one_row_and_the_other_verbs_work(mindspeed, package, source, message):
    package("acme", "greet", source, "greet")
    package("bolt", "welcome", WORKS, "greet")
    help_text = mindspeed("--help").stdout
    assert ROW.format(verb="greet  ", code=101, providers="acme 1.2") in help_text
    assert "  welcome  Greet somebody.\n" in help_text
    done = mindspeed("greet", "--any", "word")
    assert (done.exit_code, done.stderr) == (
        1,
        f"MS101 greet of acme {message}\n  where: acme 1.2, acme_verbs:greet\n  fix: fix or uninstall acme\n",
    )
    assert mindspeed("welcome", "world").stdout == "hello world\n"
    assert mindspeed("explain", "MS101").exit_code == 0


def test_a_verb_of_two_packages_is_none(mindspeed, package):
    package("acme", "greet", WORKS, "greet")
    package("bolt", "greet", WORKS, "greet")
    assert ROW.format(verb="greet", code=102, providers="acme 1.2, bolt 1.2") in mindspeed("--help").stdout
    assert "acme 1.2 and bolt 1.2 provide it" in mindspeed("greet", "world").stderr


def test_a_package_takes_no_verb_of_mindspeed_and_none_where_it_may_not_load(mindspeed, package, monkeypatch):
    package("acme", "explain", "raise SystemExit", "greet")
    assert mindspeed("explain", "MS101").exit_code == 0
    assert mindspeed("--help").stdout.endswith(
        f"Commands of other packages:\n{ROW.format(verb='explain', code=102, providers='acme 1.2')}"
    )
    package("bolt", "greet", WORKS, "greet")
    monkeypatch.setenv("MINDSPEED_PLUGINS", "none")
    extensions.cache_clear()
    assert mindspeed("greet", "world").exit_code == 2


@pytest.mark.budget(5)
def test_a_verb_of_mindspeed_looks_for_no_others():
    read = "import sys; from mindspeed.cli import main; main(['ops', '--help'], standalone_mode=False)"
    program = f"{read}; assert 'mindspeed.plugins.extensions' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
