"""``mindspeed explain`` on texts that others print."""

import json

import pytest

from mindspeed.workbench.diagnostics.known_errors import SYMPTOMS, symptoms_in

TEXTS = [
    "AttributeError: 'Parameter' object has no attribute 'main_grad'",
    "ModuleNotFoundError: No module named 'megatron.core.datasets.helpers_cpp'",
    "ModuleNotFoundError: sentencepiece library should be installed.",
    "ValueError: Unable to instantiate HuggingFace AutoTokenizer for /nowhere. Exception: ...",
    "context parallelism require setting the environment variable CUDA_DEVICE_MAX_CONNECTIONS to 1",
    "AssertionError: zero_centered_gamma not supported by torch LayerNorm",
    "RuntimeError: [enforce fail at ...] Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144]",
    "Using /home/user/.cache/torch_extensions/py310_cpu as PyTorch extensions root...",
    "ImportError: libhccl.so: cannot open shared object file: No such file or directory",
    "ImportError: /site-packages/torch_npu/lib/libtorch_npu.so: undefined symbol: _ZN3c104impl8GPUTrace13gpuTraceStateE",
    "importlib.metadata.PackageNotFoundError: No package metadata was found for megatron-core",
    "File transformer_engine/common/__init__.py, line 200, in _load_cudnn",
    "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients in the TCPStore",
    "TypeError: initialize_megatron() got an unexpected keyword argument 'extra_args_provider'",
    "AssertionError: Rank 0: found NaN in local grad norm in backward pass before data-parallel communication collective",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB",
    "Exception: the patch of forward exist !",
    "ImportError: cannot import name 'override' from 'typing' (/usr/lib/python3.11/typing.py)",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242",
]


@pytest.mark.guards(37)
@pytest.mark.parametrize(("text", "symptom"), list(zip(TEXTS, SYMPTOMS, strict=True)), ids=range(len(TEXTS)))
def test_a_text_is_told_from_the_others(text, symptom):
    assert symptoms_in(text) == [symptom]


def test_data_helpers_are_compiled_for_the_python_that_runs():
    """Megatron's Makefile asks ``python3-config``, which may be another Python's."""
    (symptom,) = symptoms_in("Exception: MockGPTDataset failed to build as a mock data generator")
    assert "make -C megatron/core/datasets LIBEXT=$(python -c " in symptom.fix


@pytest.mark.parametrize("text", ["CUDA out of memory", "NPU out of memory. Tried to allocate", "out of memory"])
def test_a_device_without_memory_is_known(text):
    (symptom,) = symptoms_in(text)
    assert "activation recomputation" in symptom.fix


def test_a_gradient_that_is_not_a_number_is_known():
    assert symptoms_in("RuntimeError: Found NaN in the grad")


@pytest.mark.parametrize("package", ["transformers", "sentencepiece", "tiktoken"])
def test_a_tokenizer_without_its_package_is_known(package):
    (symptom,) = symptoms_in(f"ModuleNotFoundError: No module named '{package}'")
    assert "pip install transformers (HuggingFaceTokenizer), sentencepiece" in symptom.fix


def test_the_cause_and_the_fix_are_printed(mindspeed):
    done = mindspeed("explain", "gloo connectFullMesh failed")
    assert (done.exit_code, done.stdout) == (
        0,
        "A gloo group connects every rank to every other rank, and one of these connections failed. Possible\n"
        "causes: an interface or a host name that other nodes cannot reach, a firewall, too few file\n"
        "descriptors, or too many ranks.\n"
        "  fix: export GLOO_SOCKET_IFNAME=INTERFACE, give the host a name that other nodes can resolve, raise\n"
        "       ulimit -n, or use Megatron-LM's --disable-gloo-process-groups\n",
    )


def test_json_holds_the_symptoms(mindspeed):
    (found,) = json.loads(mindspeed("explain", "--json", "the patch of forward exist !").stdout)["symptoms"]
    assert found.keys() == {"pattern", "cause", "fix"}
    assert json.loads(mindspeed("explain", "--json", "it rains").stdout) == {"symptoms": []}


def test_an_unknown_text_is_a_usage_error(mindspeed):
    done = mindspeed("explain", "it rains")
    assert done.exit_code == 2
    assert "Error: no known error matches this text, and it is not an error code; see docs/troubleshooting.md" in done.stderr
