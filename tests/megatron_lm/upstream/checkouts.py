"""A made-up Megatron-LM with rules of every form, in the shape of the real one."""

from pathlib import Path

ARGUMENTS = """
import argparse
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import is_torch_min_version
import dataclasses

def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("num-layers", "hidden-size", "save-interval", "eval-interval", "tensor-model-parallel-size"):
        parser.add_argument(f"--{name}", type=int, default=1)
    for name in ("bf16", "fp16", "swiglu", "exits", "loops", "deterministic-mode"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    return parser.parse_known_args()[0]

def validate_args(args, defaults={}):
    assert args.hidden_size % args.tensor_model_parallel_size == 0, "hidden does not divide"
    if args.bf16:
        assert not args.fp16
    if args.num_layers > 100:
        raise ValueError(f"{args.num_layers} layers are too many")
    if torch.cuda.get_device_capability()[0] < 10:
        assert args.save_interval == args.eval_interval, "intervals differ"
    if is_torch_min_version("2.4.0"):
        assert args.swiglu, "newer ones need it"
    if args.exits:
        print("--exits is gone")
        exit()
    assert args.num_layers < 50 or not args.add_bias_linear, "deep ones have no biases"
    while args.loops:
        pass
    args.deterministic = helper(args)

def helper(args):
    assert not args.deterministic_mode, "not deterministic"
    return False

def core_transformer_config_from_args(args, config_class=None):
    known = {f.name: getattr(args, f.name) for f in dataclasses.fields(TransformerConfig) if hasattr(args, f.name)}
    known["activation_func"] = F.silu if args.swiglu else F.gelu
    return TransformerConfig(**known)
"""
MISSING = """
import argparse

def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--encoder-num-layers", type=int)
    return parser.parse_known_args()[0]

def validate_args(args, defaults={}):
    if args.num_layers is not None:
        args.encoder_num_layers = args.num_layers
    else:
        assert args.encoder_num_layers is not None, "one of them is needed"
        args.num_layers = args.encoder_num_layers
    for name in ["num_layers"]:
        needed(args, name)

def needed(args, arg):
    assert getattr(args, arg) is not None, f"{arg} is None"

def core_transformer_config_from_args(args, config_class=None):
    pass
"""
"""Arguments of which one is needed, in two spellings."""
CONFIG = """
from dataclasses import dataclass
import torch
import torch.nn.functional as F
from ..enums import Kind

@dataclass
class TransformerConfig(torch.nn.Module):
    num_layers: int = 0
    activation_func: object = F.gelu
    dtype: torch.dtype = torch.float32
    kind: Kind = Kind.plain

    def __post_init__(self):
        if self.num_layers < 1:
            raise ValueError("no layers")
        if self.activation_func == F.silu and self.num_layers == 3:
            raise ValueError("three gated layers")
"""


def make(root: Path, arguments: str = ARGUMENTS) -> Path:
    """Write it to a folder, which is returned."""
    files = {
        "megatron/training/arguments.py": arguments,
        "megatron/training/__init__.py": "import torch\nfrom .nowhere import pretrain\n",
        "megatron/core/__init__.py": "",
        "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = ''\n",
        "megatron/core/utils.py": "def is_torch_min_version(version):\n    return False\n",
        "megatron/core/enums.py": "import enum\n\n\nclass Kind(enum.Enum):\n    plain = 1\n",
        "megatron/core/transformer/__init__.py": "from .transformer_config import TransformerConfig\n",
        "megatron/core/transformer/transformer_config.py": CONFIG,
        "pretrain_gpt.py": "",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
