"""Names of torch.cuda that scripts ask for, and what they answer on the CPU."""

import pytest
import torch

import mindspeed
from mindspeed.platforms import cpu_memory

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def limit_lifted():
    yield
    cpu_memory.LIMIT = None


def test_a_stream_context_can_be_entered_again():
    side = torch.cuda.Stream()
    context = torch.cuda.stream(side)
    for _ in range(2):
        with context:
            assert torch.cuda.current_stream() is side
        assert torch.cuda.current_stream() is torch.cuda.default_stream()
    with torch.cuda.StreamContext(None):
        assert torch.cuda.current_stream() is torch.cuda.default_stream()


def test_streams_have_one_priority_and_events_travel_by_handle():
    assert torch.cuda.Stream.priority_range() == (0, 0)
    start = torch.cuda.Event(interprocess=True)
    start.record()
    assert torch.cuda.Event.from_ipc_handle(0, start.ipc_handle()).elapsed_time(start) == 0
    with pytest.raises(RuntimeError, match="both events must be recorded"):
        torch.cuda.Event.from_ipc_handle(0, torch.cuda.Event().ipc_handle()).elapsed_time(start)


def test_gauges_of_the_device_give_whole_numbers():
    gauges = (torch.cuda.temperature, torch.cuda.power_draw, torch.cuda.utilization, torch.cuda.clock_rate)
    readings = [gauge() for gauge in gauges]
    assert [type(reading) for reading in readings] == [int] * 4
    assert 0 <= torch.cuda.utilization() <= 100
    assert torch.cuda.device_memory_used() > 0


def test_profiling_calls_succeed_and_do_nothing():
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
    with torch.autograd.profiler.emit_nvtx(record_shapes=True):
        torch.ones(1)
    with torch.cuda.profiler.profile():
        torch.ones(1)
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        torch.cuda.check_error(2)


def test_a_snapshot_of_memory_has_no_segments(tmp_path):
    torch.cuda.memory._record_memory_history(True)
    assert torch.cuda.memory._snapshot()["segments"] == []
    torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    assert (tmp_path / "snapshot.pickle").stat().st_size > 0


def test_nccl_has_a_version_and_options():
    assert torch.cuda.nccl.version() == (0, 0, 0)
    options = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 8
    assert (options.is_high_priority_stream, options.config.max_ctas) == (True, 8)


def test_the_options_of_nccl_are_gone_when_the_platform_is():
    before = "ProcessGroupNCCL" in vars(torch.distributed)
    mindspeed.deactivate()
    try:
        after = "ProcessGroupNCCL" in vars(torch.distributed)
    finally:
        mindspeed.activate(mindspeed.plan(platform="cpu"))
    assert (before, after) == (True, torch.distributed.distributed_c10d._NCCL_AVAILABLE)


def test_the_class_of_generators_has_its_methods():
    assert torch.Generator.manual_seed(torch.Generator(), 3).initial_seed() == 3
    with pytest.raises(AttributeError):
        torch.Generator.no_such_method  # noqa: B018


def test_memory_of_a_process_is_its_share_of_the_host(monkeypatch):
    (whole,) = {torch.cuda.mem_get_info()[1], torch.cuda.get_device_properties(0).total_memory}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert torch.cuda.get_device_properties(0).total_memory == whole // 4
    free, total = torch.cuda.mem_get_info()
    assert total == whole // 4
    assert 0 <= free <= total - torch.cuda.memory_allocated() + (1 << 24)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(1 << 31, device="cuda"),
        lambda: torch.empty(1 << 31).cuda(),
        lambda: torch.empty(1 << 31).to("cuda"),
    ],
    ids=["factory", "cuda", "to"],
)
def test_a_tensor_beyond_the_limit_of_the_process_is_out_of_memory(limit_lifted, make):
    used, total = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, (used + (1 << 30)) / total))
    with pytest.raises(torch.cuda.OutOfMemoryError, match="a tensor needs 8192 MiB"):
        make()
    assert torch.empty(1 << 10, device="cuda").shape == (1 << 10,)


def test_a_fraction_of_memory_lies_between_zero_and_one():
    with pytest.raises(ValueError, match="Invalid fraction value: 2"):
        torch.cuda.set_per_process_memory_fraction(2)


def test_memory_that_the_host_does_not_have_is_out_of_memory():
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(1 << 60, device="cuda")
    with pytest.raises(RuntimeError, match="negative dimension"):
        torch.empty(-1, device="cuda")
