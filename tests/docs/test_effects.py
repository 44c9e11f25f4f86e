"""Numbers on the pages of features are those that their commands print."""

import pytest

from mindspeed.plugins.discovery import BUILT_IN
from mindspeed.registry import catalog
from mindspeed.workbench.verification.pool import WorkerPool
from tests.docs.effects import Published, printed, published

PUBLISHED = {row.name: list(published(row.name)) for row in catalog().rows if row.distribution == BUILT_IN}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(name for name, effects in PUBLISHED.items() if effects))
def test_the_commands_of_a_page_print_its_numbers(name: str, pool: WorkerPool) -> None:
    for effect in PUBLISHED[name]:
        assert effect.missing(set().union(*(printed(command, pool) for command in effect.commands))) == [], effect


def test_a_number_that_no_command_prints_is_missing() -> None:
    effect = Published(("features verify a",), ("200,920", "81,804"), ("0.74", "2.2"))
    assert effect.missing({200_920, 737_280}) == ["81,804", "2.2 MB"]
    assert effect.missing({200_920, 81_804, 737_280, 2_211_840}) == []
