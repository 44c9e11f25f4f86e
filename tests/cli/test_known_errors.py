"""``mindspeed explain`` on texts that others print."""

import json

import pytest

from mindspeed.workbench.diagnostics.known_errors import SYMPTOMS, symptoms_in


@pytest.mark.guards(37)
@pytest.mark.parametrize("symptom", SYMPTOMS, ids=range(len(SYMPTOMS)))
def test_a_text_as_it_was_printed_is_told_from_the_others(symptom):
    assert symptoms_in(symptom.example) == [symptom]


def test_every_known_text_has_a_source_and_they_are_many():
    assert len(SYMPTOMS) > 60
    assert [symptom.pattern for symptom in SYMPTOMS if not symptom.source.startswith("https://")] == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "it rains",
        "loss 2.31  grad norm 1.02",
        "step 100 of 200 saved",
        "INFO: started 8 processes",
        "the exit code is 0",
        "EI0000",
        "error 42: the flux capacitor is not aligned",
    ],
)
def test_another_text_stays_unknown(text):
    assert symptoms_in(text) == []


@pytest.mark.parametrize(
    ("text", "in_cause"),
    [
        ("RuntimeError: Gloo connectFullMesh failed with [pair.cc:152] timed out connecting", "has started these ranks again"),
        ("exitcode  : -11 (pid: 6421)\n  traceback : Signal 11 (SIGSEGV) received by PID 6421", "crashed in compiled code"),
        ("  exitcode  : -9 (pid: 3309)\n  error_file: <N/A>", "killed from outside"),
    ],
)
def test_texts_of_a_restarted_job_have_their_cause(text, in_cause):
    (symptom,) = symptoms_in(text)
    assert in_cause in symptom.cause


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
        "A gloo group connects every rank to every other rank, and one of these connections failed. If\n"
        "torchrun has started these ranks again in a store that it shares with them, they read the addresses\n"
        "of the ranks before. Otherwise the causes are an interface or a host name that other nodes cannot\n"
        "reach, a firewall, too few file descriptors, or too many ranks.\n"
        "  fix: after a restart, export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun (a rank with a\n"
        "       plan of mindspeed does not need it). At the first start, export GLOO_SOCKET_IFNAME=INTERFACE,\n"
        "       give the host a name that other nodes can resolve, raise ulimit -n, or use Megatron-LM's\n"
        "       --disable-gloo-process-groups\n"
        "  source: https://github.com/pytorch/gloo/blob/main/gloo/rendezvous/context.cc\n",
    )


def test_json_holds_the_symptoms(mindspeed):
    (found,) = json.loads(mindspeed("explain", "--json", "the patch of forward exist !").stdout)["symptoms"]
    assert found.keys() == {"pattern", "cause", "fix", "example", "source"}
    assert json.loads(mindspeed("explain", "--json", "it rains").stdout) == {"symptoms": []}


def test_an_unknown_text_is_a_usage_error(mindspeed):
    done = mindspeed("explain", "it rains")
    assert done.exit_code == 2
    assert "Error: no known error matches this text, and it is not an error code; see docs/troubleshooting.md" in done.stderr
