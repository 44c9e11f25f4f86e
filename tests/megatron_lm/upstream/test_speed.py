"""How long a check takes."""

import os
from pathlib import Path

import pytest

from tests.megatron_lm.checkout import VARIABLE
from tools.lint_speed import measured

pytestmark = [pytest.mark.long, pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no checkout")]


@pytest.mark.budget(300)
def test_one_command_takes_a_second_and_300_take_15_processor_seconds() -> None:
    """Two processes share the work of one command: on two idle cores 0.95 processor seconds pass in 0.73 s."""
    seconds = measured(Path(os.environ[VARIABLE]))
    assert seconds["one"]["wall"] <= 1.0 or seconds["one"]["processor"] <= 1.3
    assert seconds["many"]["processor"] <= 15.0
