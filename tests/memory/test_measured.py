"""The planner's peak beside the peak of a training step, for jobs of several features, layouts and types."""

import pytest

from benchmarks._memory_jobs import JOBS, Job, foretold_and_measured
from mindspeed.workbench.verification.pool import WorkerPool

pytestmark = pytest.mark.long


@pytest.mark.parametrize("job", JOBS, ids=lambda job: "+".join(job[0]))
def test_the_foretold_peak_is_within_five_percent(pool: WorkerPool, job: Job) -> None:
    foretold, measured = foretold_and_measured(pool, job)
    assert foretold == pytest.approx(measured, rel=0.05)
