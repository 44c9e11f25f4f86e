"""Three journeys of a newcomer, run from the pages alone."""

import os
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.docs.journeys import Step, steps, walk

ROOT = Path(__file__).resolve().parents[2]
CLONE = os.environ.get("MEGATRON_LM_GIT", "")


def test_steps_are_commands_with_their_continuations_documents_and_output():
    page = "text\n```console\n$ a \\\n    b\nout\n$ cat > f <<'EOF'\n$ x\nEOF\n```\n```\n$ no\n```\n```console\n$ c\n...\n```\n"
    assert list(steps(page)) == [
        Step("a \\\n    b", ("out",)),
        Step("cat > f <<'EOF'\n$ x\nEOF", ()),
        Step("c", ("...",)),
    ]


def test_a_command_that_fails_and_a_line_that_is_not_printed_are_told(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```console\n$ mkdir a && cd a\n$ echo loss 1.25 0eb621e704d4670cd22bc1b483a74a9f\n"
        "loss 3.5 1a3421298fb133cea32a2e3834750d6f\nmore\n"
        "$ pwd | grep -o a$ && false\na\n$ echo not reached\n```\n"
    )
    first, second = walk(page, tmp_path, dict(os.environ))
    assert first == (
        "$ echo loss 1.25 0eb621e704d4670cd22bc1b483a74a9f\nexit status 0, not printed: ['more']\n"
        "loss 1.25 0eb621e704d4670cd22bc1b483a74a9f\n"
    )
    assert second == "$ pwd | grep -o a$ && false\nexit status 1, not printed: []\na\n"


@pytest.fixture
def environment(tmp_path):
    """The variables of a shell with an environment on top of this one, into which a journey may install."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "below.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    for name, module in (("mindspeed", "mindspeed"), ("torchrun", "torch.distributed.run"), ("pytest", "pytest")):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -m {module} "$@"\n')
        script.chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MINDSPEED_", "PYTHON"))}
    variables |= {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    if CLONE:
        variables |= {
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"url.file://{CLONE}.insteadOf",
            "GIT_CONFIG_VALUE_0": "https://github.com/NVIDIA/Megatron-LM.git",
        }
    return variables


@pytest.mark.long
@pytest.mark.parametrize("page", ["quickstart-megatron-lm", "quickstart-mindspeed", "first-feature"])
def test_a_newcomer_gets_there_with_the_page_alone(page, tmp_path, environment):
    if page.startswith("quickstart") and not CLONE:
        pytest.skip("MEGATRON_LM_GIT names no clone of Megatron-LM with the tag core_v0.16.1")
    work = tmp_path / "work"
    work.mkdir()
    differences = walk(ROOT / "docs" / f"{page}.md", work, environment)
    assert differences == [], "\n".join(differences)
