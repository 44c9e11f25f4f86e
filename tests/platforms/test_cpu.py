"""Code written for one CUDA device runs on the CPU: placement, random numbers, streams, memory, and torch's own parts."""

import io

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mindspeed.platforms import runtime

pytestmark = pytest.mark.usefixtures("on_cpu")


DEVICES = ["cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 1)]


@pytest.mark.parametrize("device", DEVICES, ids=repr)
def test_every_spelling_of_the_device_is_the_cpu(device):
    made = [
        torch.empty(2, device=device),
        torch.tensor([1.0], device=device),
        torch.rand(2, device=device),
        torch.arange(3, device=device),
        torch.ones(2).new_zeros(2, device=device),
        torch.ones(2).to(device),
        torch.ones(2).to(device=device),
        torch.ones(2).cuda(device),
        torch.nn.Linear(2, 2, device=device).weight,
        torch.nn.Linear(2, 2).to(device).weight,
        torch.nn.Linear(2, 2).cuda(device).weight,
        torch.nn.Linear(2, 2, device="meta").to_empty(device=device).weight,
    ]
    assert {tensor.device for tensor in made} == {torch.device("cpu")}


def test_moving_to_the_device_converts_the_dtype_and_keeps_a_tensor_that_is_there():
    tensor = torch.ones(2, device="cuda")
    assert tensor.to("cuda", torch.float64).dtype is torch.float64
    assert tensor.cuda() is tensor
    assert tensor.to(tensor.device) is tensor


@pytest.mark.parametrize("copy", [lambda t: t.cpu(), lambda t: t.to("cpu"), lambda t: t.to("cpu", non_blocking=True)])
def test_a_host_copy_does_not_see_later_writes(copy):
    tensor = torch.ones(2, device="cuda")
    host = copy(tensor)
    tensor.zero_()
    assert host.tolist() == [1, 1]


def test_device_contexts_place_on_the_cpu_and_meta_stays_meta():
    with torch.device("cuda"):
        assert torch.empty(2).device.type == "cpu"
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(2).device.type == "cpu"
    finally:
        torch.set_default_device(None)


def test_pinning_copies_and_costs_no_accelerator():
    tensor = torch.ones(2)
    pinned = tensor.pin_memory()
    assert pinned.data_ptr() != tensor.data_ptr()
    assert torch.empty(2, pin_memory=True).shape == (2,)


def test_type_names_are_cudas_for_megatron_alone():
    ask = "name = tensor.type()"
    megatron, script = {"__name__": "megatron.core.optimizer", "tensor": torch.ones(1)}, {"tensor": torch.ones(1)}
    exec(ask, megatron)
    exec(ask, script)
    assert (megatron["name"], script["name"]) == ("torch.cuda.FloatTensor", "torch.FloatTensor")
    assert torch.cuda.HalfTensor is torch.HalfTensor
    assert torch.cuda.FloatTensor([1.0]).tolist() == [1.0]


def test_a_saved_file_loads_onto_the_device():
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    for location in ("cuda:0", torch.device("cuda"), {"cpu": "cuda:1"}, lambda storage, where: storage.cuda()):
        file.seek(0)
        assert torch.load(file, map_location=location).tolist() == [1, 1]


def test_one_seed_gives_host_and_device_the_same_numbers_from_two_generators():
    torch.manual_seed(7)
    host = torch.rand(4)
    device = torch.rand(4, device="cuda")
    assert torch.equal(host, device)
    state = torch.get_rng_state()
    functional.dropout(torch.ones(100, device="cuda"))
    assert torch.equal(state, torch.get_rng_state())


def test_the_device_state_repeats_dropout():
    state = torch.cuda.get_rng_state()
    first = functional.dropout(torch.ones(100))
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, functional.dropout(torch.ones(100)))


def test_host_numbers_do_not_depend_on_what_the_device_draws():
    torch.manual_seed(3)
    expected = torch.randint(100, (5,))
    torch.manual_seed(3)
    functional.dropout(torch.ones(10))
    assert torch.equal(torch.randint(100, (5,)), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_dropout_is_recomputed_as_it_was(reentrant):
    weight = torch.ones(1000, requires_grad=True)
    output = checkpoint(lambda w: functional.dropout(w) * w, weight, use_reentrant=reentrant)
    output.sum().backward()
    assert torch.equal(weight.grad, 2 * output.detach())


def test_a_loader_of_data_draws_from_the_host():
    device, host = torch.cuda.get_rng_state(), torch.get_rng_state()
    assert list(torch.utils.data.DataLoader([1, 2], batch_size=None)) == [1, 2]
    assert torch.equal(torch.cuda.get_rng_state(), device)
    assert not torch.equal(torch.get_rng_state(), host)


def test_a_generator_for_the_device_is_a_generator():
    generator = torch.Generator(device="cuda").manual_seed(5)
    again = torch.Generator().manual_seed(5)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.equal(torch.rand(3, device="cuda", generator=generator), torch.rand(3, generator=again))


def test_autocast_for_the_device_computes_in_half_precision():
    one = torch.ones(2, 2)
    with torch.autocast("cuda"):
        assert torch.is_autocast_enabled()
        assert (one @ one).dtype is torch.float16
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (one @ one).dtype is torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            assert (one @ one).dtype is torch.float32


def test_a_custom_function_keeps_the_autocast_of_its_forward():
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a @ a

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            (a,) = ctx.saved_tensors
            seen.append((a @ a).dtype)
            return grad.to(a.dtype)

    seen: list[torch.dtype] = []
    a = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product = Product.apply(a)
    product.float().sum().backward()
    assert seen == [torch.bfloat16]


def test_a_gradient_scaler_for_the_device_scales():
    model = torch.nn.Linear(2, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    assert torch.equal(model.weight.grad, torch.full((1, 2), 4.0))
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(model.weight, before - 0.1)


def test_streams_and_events_run_in_program_order():
    side, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
        tensor = torch.ones(2, device="cuda")
        tensor.record_stream(side)
    torch.cuda.current_stream().wait_stream(side)
    end.record()
    torch.cuda.synchronize()
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    assert start.elapsed_time(end) > 0
    with pytest.raises(RuntimeError, match="both events must be recorded"):
        start.elapsed_time(torch.cuda.Event())


def test_the_peak_of_memory_is_measured_and_can_be_reset():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    assert torch.cuda.max_memory_allocated() - before > 48 << 20
    del block
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() - before < 32 << 20
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.peak"] > 0
    assert stats["num_alloc_retries"] == 0


def test_device_questions_have_answers():
    torch.cuda.set_device(3)
    try:
        assert (torch.cuda.is_available(), torch.cuda.current_device(), torch.cuda.device_count()) == (True, 3, 4)
        with torch.cuda.device(1):
            assert torch.cuda.current_device() == 1
        assert torch.cuda.current_device() == 3
        assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info()[1]
        assert torch.cuda.get_device_capability() == (8, 0)
        assert torch.cuda.is_bf16_supported()
    finally:
        torch.cuda.set_device(0)


def test_the_runtime_speaks_for_the_cpu():
    assert (runtime.platform(), runtime.device(), runtime.backend()) == ("cpu", torch.device("cpu"), "gloo")
    module = runtime.device_module()
    assert 0 < module.memory_allocated() <= module.max_memory_allocated()
    with module.stream(module.Stream()):
        module.Event(enable_timing=True).record(module.current_stream())
    module.synchronize()


def test_scripted_functions_still_know_the_factories():
    scripted = torch.jit.script(_with_factories)
    assert scripted(torch.ones(2)).tolist() == [2, 2]


def _with_factories(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(2) + x.to(torch.float32) + torch.ones_like(x)


def test_torch_compile_still_captures_whole_graphs():
    def function(x):
        made = torch.ones(3, device="cuda") if torch.cuda.is_available() else torch.zeros(3)
        return functional.gelu(x.to("cuda")) + made

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), function(torch.ones(3)))


def test_a_fake_tensor_is_on_no_side_and_works():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        assert torch.empty(2).cuda().normal_().to(torch.float64).shape == (2,)


@pytest.mark.long
def test_torch_compile_still_generates_code():
    def function(x):
        return functional.gelu(x) + torch.ones(3, device="cuda")

    assert torch.allclose(torch.compile(function)(torch.ones(3)), function(torch.ones(3)))


def test_a_data_loader_with_workers_and_pinned_memory_still_loads():
    loader = torch.utils.data.DataLoader(torch.arange(6), batch_size=3, pin_memory=True, num_workers=1)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]


def test_forking_the_random_state_restores_both_generators():
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    with torch.random.fork_rng(devices=[0]):
        torch.rand(2)
        torch.rand(2, device="cuda")
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], torch.cuda.get_rng_state())


def test_cuda_sources_are_refused_as_without_a_device():
    from torch.utils.cpp_extension import load_inline

    with pytest.raises(RuntimeError, match="no device is available to compile CUDA sources for"):
        load_inline("nothing", cpp_sources=[""], functions=[], with_cuda=True)
