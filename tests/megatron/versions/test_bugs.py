"""The bugs of Megatron on every version that is at hand: each shows in its releases, and not with the patch that mends it."""

import json

import pytest

from mindspeed.engine.resolution.environment import version_in
from mindspeed.workbench.lint.traps import known_traps
from tests.megatron.versions.conftest import RESULTS, Megatron

pytestmark = pytest.mark.long


def test_bugs_show_in_their_releases_until_they_are_mended(megatron: Megatron) -> None:
    printed = megatron.run("-m", "tests.megatron.bug_proofs").splitlines()[-1]
    folder = RESULTS.with_name("bugs")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{megatron.version}.json").write_text(printed, encoding="utf-8")
    found = json.loads(printed)
    bugs = {bug.name: bug for bug in known_traps()}
    run = {name: seen for name, seen in found["bugs"].items() if seen["without"]["state"] != "not run"}
    shown = {name for name, seen in run.items() if seen["without"]["state"] == "shown"}
    assert shown == {name for name in run if version_in(found["megatron"], bugs[name].megatron)}
    assert [name for name, seen in run.items() if seen.get("with", {}).get("state") == "shown"] == []
