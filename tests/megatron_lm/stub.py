"""A Megatron-LM of a few lines, for tests without a checkout: its parser has the recorded arguments of the real one."""

from pathlib import Path

from mindspeed.engine.inspection.megatron_copies import package_root

ARGUMENTS = """
import argparse
from mindspeed.engine.inspection.cli_arguments import surface

def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = argparse.ArgumentParser(prog="pretrain", allow_abbrev=False)
    for one in surface("0.16.1").arguments:
        if one.takes_value:
            kind = {"int": int, "float": float}.get(one.type, str)
            parser.add_argument(*one.options, dest=one.dest, default=one.default, nargs=one.nargs, type=kind)
        else:
            parser.add_argument(*one.options, dest=one.dest, default=one.default, action="store_const", const=not one.default)
    if extra_args_provider is not None:
        extra_args_provider(parser)
    return parser.parse_args()

def validate_args(args, defaults={}):
    per_rank = args.num_virtual_stages_per_pipeline_rank
    args.virtual_pipeline_model_parallel_size = per_rank
    if args.ffn_hidden_size is None and args.hidden_size:
        args.ffn_hidden_size = 4 * args.hidden_size
    return args
"""

INITIALIZE = """
from megatron.training.arguments import parse_args, validate_args

def initialize_megatron(extra_args_provider=None, args_defaults={}):
    return validate_args(parse_args(extra_args_provider), args_defaults)
"""

LATER_ARGUMENTS = (
    ARGUMENTS
    + """
def parse_and_validate_args(extra_args_provider=None, args_defaults={}):
    return validate_args(parse_args(extra_args_provider), args_defaults)
"""
)

LATER_INITIALIZE = """
from megatron.training.arguments import parse_and_validate_args as initialize_megatron
"""
"""Later releases parse and validate in one function."""

SCRIPT = """
{first}
from megatron.training.initialize import initialize_megatron
{last}
import json, sys

def extra(parser):
    parser.add_argument("--my-own-flag", default="unset")

args = initialize_megatron(extra)
print("ARGS", json.dumps({{name: value for name, value in vars(args).items() if name in {names}}}, sort_keys=True))
print("ARGV", json.dumps(sys.argv[1:]))
"""
LINE = "import mindspeed.megatron_adaptor"


def build(folder: Path) -> Path:
    """A checkout in ``folder``: the installed megatron.core, and a megatron.training that only parses."""
    core = package_root("core")
    assert core is not None
    training = folder / "megatron" / "training"
    training.mkdir(parents=True)
    (folder / "megatron" / "core").symlink_to(core / "core")
    for name, text in {"__init__": "", "arguments": ARGUMENTS, "initialize": INITIALIZE}.items():
        (training / f"{name}.py").write_text(text)
    return folder


def script(folder: Path, names: list[str], line: str = "first") -> Path:
    """A script beside the checkout that prints some of its validated arguments; ``line`` says where ours stands."""
    path = folder / "pretrain.py"
    places = {"first": "", "last": ""} | ({line: LINE} if line else {})
    path.write_text(SCRIPT.format(names=names, **places))
    return path
