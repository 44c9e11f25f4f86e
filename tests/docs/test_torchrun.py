"""What docs/troubleshooting.md shows of a rank that fails under torchrun is what two ranks print."""

import re

import pytest

from tests.docs.torchrun_transcripts import FAULTS, MARKED, PAGE, run, shown

SHOWN = {fault: text.splitlines() for _, fault, text, _ in MARKED.findall(PAGE.read_text(encoding="utf-8"))}
SECONDS = 5.0
"""From the end of rank 1 to the end of the others and of torchrun."""
TRIES = 3
"""torchrun sends SIGTERM to rank 0 a tenth of a second after rank 1 has ended: rank 0 may not have printed anything by then."""


def comparable(lines: list[str]) -> set[str]:
    """Lines without what differs from run to run: the rank that prints first, and gloo's own words."""
    texts = (re.sub(r"rank \d(: MS610|\Z)|rank \d prints|(rank +: )\d \(local_rank: \d\)", r"\1\2", line) for line in lines)
    return {re.sub(r"RuntimeError: .*", "RuntimeError", text) for text in texts}


def test_every_fault_has_a_transcript():
    assert list(SHOWN) == list(FAULTS)
    assert all(SHOWN.values())


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_the_page_shows_what_two_ranks_print(fault, tmp_path):
    for number in range(TRIES):
        folder = tmp_path / str(number)
        folder.mkdir()
        text, seconds = run(fault, folder)
        assert seconds is None or seconds < SECONDS
        missing = comparable(SHOWN[fault]) - comparable(shown(text, folder))
        if not missing:
            return
    pytest.fail(f"never printed: {missing}\n{text}")


@pytest.mark.long
@pytest.mark.parametrize("place", ["plan", "setup", "step"])
@pytest.mark.parametrize("end", ["exit", "kill"])
def test_the_others_end_soon_after_one_rank(place, end, tmp_path):
    text, seconds = run(f"{place}: {end}", tmp_path)
    cause = text.partition("Root Cause")[2]
    assert re.search(r"rank +: 1 \(local_rank: 1\)\n +exitcode +: (3|-9) ", cause), text
    assert seconds is not None
    assert seconds < SECONDS
