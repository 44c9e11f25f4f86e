"""Host tensors and device tensors on the CPU: which is which, and from whose generator each draws."""

import copy

import numpy
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("on_cpu")


FILLS = {
    "normal_": lambda t: t.normal_(),
    "uniform_": lambda t: t.uniform_(),
    "random_": lambda t: t.random_(),
    "bernoulli_": lambda t: t.bernoulli_(0.5),
    "exponential_": lambda t: t.exponential_(),
    "nn.init.normal_": nn.init.normal_,
    "nn.init.xavier_uniform_": nn.init.xavier_uniform_,
    "nn.init.trunc_normal_": nn.init.trunc_normal_,
    "nn.init.orthogonal_": nn.init.orthogonal_,
    "rand_like": lambda t: torch.rand_like(t),
    "randint_like": lambda t: torch.randint_like(t, 9),
    "bernoulli": lambda t: torch.bernoulli(t),
    "multinomial": lambda t: torch.multinomial(t, 1),
}
HOSTS = {
    "no device": lambda: torch.ones(3, 3),
    "device='cpu'": lambda: torch.ones(3, 3, device="cpu"),
    "parameter": lambda: nn.Parameter(torch.ones(3, 3), requires_grad=False),
    "view": lambda: torch.ones(9).view(3, 3),
    "copy to the host": lambda: torch.ones(3, 3, device="cuda").cpu(),
    "like a host tensor": lambda: torch.zeros_like(torch.ones(3, 3)),
    "new of a host tensor": lambda: torch.ones(1).new_ones(3, 3),
    "other dtype": lambda: torch.ones(3, 3, dtype=torch.float64).to(torch.float32),
    "deep copy": lambda: copy.deepcopy(torch.ones(3, 3)),
    "from numpy": lambda: torch.from_numpy(numpy.ones((3, 3), dtype=numpy.float32)),
    "pinned": lambda: torch.ones(3, 3, device="cuda").pin_memory(),
}
DEVICES = {
    "device='cuda'": lambda: torch.ones(3, 3, device="cuda"),
    "a number": lambda: torch.ones(3, 3, device=0),
    ".cuda()": lambda: torch.ones(3, 3).cuda(),
    ".to('cuda')": lambda: torch.ones(3, 3).to("cuda"),
    "module": lambda: nn.Linear(3, 3).cuda().weight.detach(),
    "like a device tensor": lambda: torch.ones_like(torch.ones(3, 3, device="cuda")),
    "as_tensor": lambda: torch.as_tensor(torch.ones(3, 3, device="cuda")),
    "default device": lambda: in_context("cuda"),
    "operator": lambda: torch.ones(3, 3, device="cuda") * 2,
    "where another one is": lambda: torch.ones(3, 3, device=torch.ones(1, device="cuda").device),
}


def in_context(device):
    with torch.device(device):
        return torch.ones(3, 3)


def who_drew(draw):
    host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
    draw()
    changed = {
        "host": not torch.equal(host, torch.get_rng_state()),
        "device": not torch.equal(device, torch.cuda.get_rng_state()),
    }
    return [name for name, moved in changed.items() if moved]


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_a_host_tensor_draws_from_the_host_and_a_device_tensor_from_the_device(fill):
    host, device = torch.full((3, 3), 0.5), torch.full((3, 3), 0.5, device="cuda")
    assert who_drew(lambda: fill(host)) == ["host"]
    assert who_drew(lambda: fill(device)) == ["device"]


@pytest.mark.parametrize("make", HOSTS.values(), ids=HOSTS)
def test_a_tensor_made_on_the_host_is_a_host_tensor(make):
    tensor = make()
    assert not tensor.is_cuda
    assert who_drew(tensor.normal_) == ["host"]


@pytest.mark.parametrize("make", DEVICES.values(), ids=DEVICES)
def test_a_tensor_made_on_the_device_is_a_device_tensor(make):
    tensor = make()
    assert tensor.is_cuda
    assert who_drew(tensor.normal_) == ["device"]


def test_moving_to_the_other_side_copies_and_staying_does_not():
    host, device = torch.ones(2), torch.ones(2, device="cuda")
    moved = [host.cuda(), host.to("cuda"), host.to(device="cuda"), device.cpu(), device.to("cpu")]
    host.zero_()
    device.zero_()
    assert [tensor.tolist() for tensor in moved] == [[1, 1]] * 5
    assert host.cpu() is host
    assert host.to("cpu") is host
    assert device.cuda() is device
    assert device.to("cuda") is device


def test_weights_initialised_on_the_host_do_not_depend_on_what_the_device_drew():
    torch.manual_seed(1)
    expected = nn.Linear(4, 4).weight
    torch.manual_seed(1)
    torch.rand(7, device="cuda")
    assert torch.equal(nn.Linear(4, 4).weight, expected)


def test_moving_a_module_moves_its_parameters_and_keeps_them_the_same_objects():
    linear = nn.Linear(2, 2)
    weight = linear.weight
    linear.cuda()
    assert linear.weight is weight
    assert weight.is_cuda
    assert weight.is_leaf
    linear.cpu()
    assert not weight.is_cuda


def test_torch_itself_is_told_that_no_tensor_is_on_cuda():
    ask = "answer = tensor.is_cuda"
    torchs, script = {"__name__": "torch.nn.functional"}, {"__name__": "megatron.core.optimizer"}
    for module in (torchs, script):
        exec(ask, module, scope := {"tensor": torch.ones(1, device="cuda")})
        module["answer"] = scope["answer"]
    assert (torchs["answer"], script["answer"]) == (False, True)
    assert not torch.empty(1, device="meta").is_cuda


def test_a_sparse_tensor_is_on_no_side_and_works():
    assert torch.eye(2).to_sparse().clone().to_dense().tolist() == [[1, 0], [0, 1]]
