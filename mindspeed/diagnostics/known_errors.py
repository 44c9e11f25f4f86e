"""Error texts of Megatron, torch and the system whose cause is known: ``mindspeed explain "<error text>"``. Light."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Final

BUILD_HELPERS: Final = (
    "make -C megatron/core/datasets LIBEXT=$(python -c \"import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))\")"
)
"""The command that compiles Megatron's data helpers for the running Python, whatever Python ``python3-config`` is of."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """A text that others print (a regular expression), its usual cause, and what to do."""

    pattern: str
    cause: str
    fix: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


SYMPTOMS: Final = (
    Symptom(
        r"'Parameter' object has no attribute 'main_grad'|has no attribute 'main_grad'",
        "Megatron's fused gradient accumulation adds to a buffer that only its own data-parallel wrapper gives to a parameter. "
        "A parameter that was frozen when the model was wrapped (as the base weights under LoRA), or a model that never was "
        "wrapped, has none.",
        "--no-gradient-accumulation-fusion (gradient_accumulation_fusion=False), or wrap the model in Megatron's "
        "DistributedDataParallel after parameters were frozen and thawed",
    ),
    Symptom(
        r"helpers_cpp|No module named '?helpers'?|failed to (compile|make) the C\+\+ dataset helper|failed to build as a mock",
        "Megatron's data helpers are not compiled for this Python: a source checkout compiles them on first use, on rank 0 "
        "only, and names them after the Python of python3-config, which may be another one.",
        f"{BUILD_HELPERS} in the checkout (needs g++ and pybind11), on every node, before the job",
    ),
    Symptom(
        r"(transformers|sentencepiece|wget) library (must|should) be|name '(AutoTokenizer|tiktoken)' is not defined"
        r"|No module named '(transformers|sentencepiece|tiktoken)'",
        "The tokenizer of --tokenizer-type belongs to a package that is not installed in this environment.",
        "pip install transformers (HuggingFaceTokenizer), sentencepiece (SentencePieceTokenizer, Llama2Tokenizer) or tiktoken "
        "(TikTokenizer); --tokenizer-type NullTokenizer --vocab-size N needs none",
    ),
    Symptom(
        r"tokenizer_path: .* is invalid|Unable to instantiate HuggingFace AutoTokenizer|not a valid model identifier"
        r"|Tokenizer path must be specified|assert args\.(tokenizer_model|vocab_file|merge_file|tiktoken_pattern) is not None",
        "The files of the tokenizer are not where --tokenizer-model (or --vocab-file and --merge-file) says, or this machine "
        "cannot download them.",
        "--tokenizer-model <existing folder or file>, an absolute path that every node sees",
    ),
    Symptom(
        r"require setting the environment variable CUDA_DEVICE_MAX_CONNECTIONS",
        "Megatron-LM demands one hardware queue on GPUs before Blackwell, so that communication is launched before the "
        "computation that hides it. On the CPU and on the NPU mindspeed sets the variable.",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1",
    ),
    Symptom(
        r"zero_centered_gamma not supported by torch LayerNorm",
        "--apply-layernorm-1p (layernorm_zero_centered_gamma) needs a norm with a zero-centered weight; the local layers of "
        "Megatron have torch's norms without Apex.",
        "remove --apply-layernorm-1p; for RMSNorm a feature that exchanges the norms supports it, see mindspeed features list",
    ),
    Symptom(
        r"connectFullMesh",
        "A gloo group connects every rank to every other one, and one of these connections failed: an interface or a host name "
        "that other nodes cannot reach, a firewall, too few file descriptors, or simply too many ranks.",
        "GLOO_SOCKET_IFNAME=<interface>, a host name with a reachable address, a larger ulimit -n, or Megatron-LM's "
        "--disable-gloo-process-groups",
    ),
    Symptom(
        r"PyTorch extensions root|file_baton|FileBaton",
        "torch builds an extension under a lock file; a process that was killed while it built left the lock, and everybody "
        "waits for it.",
        "when no process builds any more, remove that one build folder in $TORCH_EXTENSIONS_DIR or ~/.cache/torch_extensions; "
        "build ahead, once per node",
    ),
    Symptom(
        r"lib(hccl|ascendcl|ascend_hal|runtime|msprof\w*|c_sec)\.so.*cannot open shared object",
        "The libraries of CANN or of its driver are not on the search path of this process.",
        "source CANN's set_env.sh in this shell and in job scripts; in a container, mount /usr/local/Ascend/driver; see "
        "mindspeed doctor",
    ),
    Symptom(
        r"(torch_npu|libtorch_npu).*undefined symbol|undefined symbol: _ZN?K?3c10|undefined symbol: _ZN2at",
        "An extension was built for another torch than the one that is installed.",
        "install the build for this torch (torch_npu has the first two numbers of torch's version); see mindspeed doctor",
    ),
    Symptom(
        r"PackageNotFoundError.*megatron[-_.]?core|No package metadata was found for megatron",
        "Something asks the installed packages for Megatron's version, and Megatron is a folder on PYTHONPATH.",
        "pip install --no-deps -e the checkout; mindspeed itself reads the version from Megatron's source",
    ),
    Symptom(
        r"_load_cudnn|cudnn.*(not found|cannot open)",
        "A build of Transformer Engine for CUDA is imported on a machine without CUDA's libraries: Megatron imports it when it "
        "finds it.",
        "pip uninstall transformer_engine transformer_engine_torch, on a machine that has no NVIDIA GPU",
    ),
    Symptom(
        r"(TCPStore|store).*(timed? ?out|timeout)|wait timeout after \d+ ?ms|(timed? ?out|timeout).*(TCPStore|the store)",
        "Ranks wait for one that ended or never came. The cause is in the output of that rank, not here.",
        "look for the first rank that ended (the launchers of mindspeed name it, MS604), and at rank 0 if it compiles "
        "something while the others wait",
    ),
    Symptom(
        r"extra_args_provider",
        "Megatron changed how a launcher adds arguments to its parser.",
        "mindspeed run, or import mindspeed.megatron_adaptor: features are named without Megatron's parser; other launchers "
        "need the Megatron that they were written for",
    ),
    Symptom(
        r"grad(ient)?[_ ]norm:? *nan|found NaN in local grad norm|Found NaN in (the )?grad",
        "A gradient is not a number. When that is so from the first steps and on some data only: one token pads and ends "
        "documents, and samples without any label divide zero by zero.",
        "give the tokenizer a padding token of its own, or prepare the data without --append-eod; else look at the learning "
        "rate and at fp16's loss scale",
    ),
    Symptom(
        r"(CUDA|NPU|HIP)?( error:)? ?out of memory|OutOfMemoryError",
        "The device has no memory left for a tensor. Most of it holds parameters, gradients, optimizer states and the "
        "activations that backward needs; memory that is reserved and not allocated is lost to fragmentation.",
        "one of: a smaller --micro-batch-size; activation recomputation, or optimizer states that are split over ranks "
        "(mindspeed features list has both); a larger --tp, --pp or --cp; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (PYTORCH_NPU_ALLOC_CONF)",
    ),
    Symptom(
        r"the patch of .* exist",
        "MindSpeed says that two of its features patch one function, without naming them.",
        "name the features to mindspeed features check: it names both and says what to take out",
    ),
)


def symptoms_in(text: str) -> list[Symptom]:
    """Every known symptom that a text shows, in the order of the table."""
    return [symptom for symptom in SYMPTOMS if re.search(symptom.pattern, text, re.IGNORECASE | re.DOTALL)]
