"""Plain megatron-core on the cpu platform, every layout and its checkpoints, on every Megatron version that is at hand."""

import pytest

from tests.megatron import test_layouts as newest
from tests.megatron.versions.conftest import Megatron

pytestmark = pytest.mark.long
RESUMED = ("load sharded pp2 x vpp2", "load sharded dp4", "load whole tp2")


@pytest.fixture(scope="module")
def alone(megatron: Megatron) -> dict[str, list[float]]:
    return newest.losses_of(1, newest.alone_cases(), str(megatron.folder))


@pytest.fixture(scope="module")
def together(megatron: Megatron, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    cases = newest.together_cases(tmp_path_factory.mktemp("checkpoints"))
    return newest.losses_of(4, cases, str(megatron.folder))


@pytest.mark.parametrize("name", newest.LAYOUTS)
def test_a_layout_gives_the_losses_of_one_process(name, alone, together):
    newest.test_a_layout_gives_the_losses_of_one_process(name, alone, together)


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_continues_on_another_layout(name, alone, together):
    newest.test_a_checkpoint_continues_on_another_layout(name, alone, together)


def test_recomputed_dropout_is_the_same_bit_for_bit(alone, together):
    newest.test_recomputed_dropout_is_the_same_bit_for_bit(alone, together)
