"""Installed distributions with planted mistakes, which the matrix and bisect have to find."""

from collections.abc import Iterable
from pathlib import Path

FEATURE = '''"""A made-up feature."""

from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, Field, Numerics, Patch, Wrap, hookimpl


class {name}Args(FeatureArgs):
    strength: int = Field(0, description="how wrong it is")


class {name}(Feature[{name}Args]):
    """Do what is planted."""

    spec = FeatureSpec("{entry}", Category.COMPUTE, numerics=Numerics.reordered(gradient=1e-4))

    @hookimpl
    def patches(self) -> list[Patch]:
        return [Wrap("{target}", f"{module}:{{'strong' if self.args.strength else 'plain'}}", reason="planted")]


{glue}
'''
MLP = "megatron.core.transformer.mlp:MLP.forward"
ATTENTION = "megatron.core.transformer.attention:Attention.forward"
PROJECTION = "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors"
FINALIZE = "megatron.core.distributed.finalize_model_grads:finalize_model_grads"
HARMLESS = """
from functools import wraps


def plain(original):
    @wraps(original)
    def inner(*args, **kwargs):
        return original(*args, **kwargs)

    return inner


def strong(original):
    @wraps(original)
    def inner(*args, **kwargs):
        output, bias = original(*args, **kwargs)
        return output * 1.5, bias

    return inner
"""
MARKED = HARMLESS.replace("    return inner\n\n\ndef strong", "    inner.marked = True\n    return inner\n\n\ndef strong")
SCALES_IF = """
from functools import wraps


def plain(original):
    @wraps(original)
    def inner(models, *args, **kwargs):
        original(models, *args, **kwargs)
        if {condition}:
            for parameter in models[0].parameters():
                parameter.main_grad.mul_(1.5)

    return inner
"""
BESIDE_MARKED = SCALES_IF.format(
    condition="getattr(__import__('megatron.core.transformer.mlp').core.transformer.mlp.MLP.forward, 'marked', False)"
)
AT_PP2 = SCALES_IF.format(
    condition="__import__('megatron.core.parallel_state').core.parallel_state.get_pipeline_model_parallel_world_size() == 2"
)
AFTER_MARKED = """
from functools import wraps


def plain(original):
    wrong = getattr(original, "marked", False)

    @wraps(original)
    def inner(*args, **kwargs):
        output, bias = original(*args, **kwargs)
        return (output * 1.5 if wrong else output), bias

    return inner
"""
GOES_AROUND = """
from functools import wraps


def plain(original):
    inside = original
    while hasattr(inside, "__wrapped__"):
        inside = inside.__wrapped__

    @wraps(original)
    def inner(*args, **kwargs):
        return inside(*args, **kwargs)

    return inner
"""
RAISES = """
def plain(original):
    def inner(*args, **kwargs):
        raise RuntimeError("planted")

    return inner
"""

AS_WRAP = """
from functools import wraps


def plain(original):
    @wraps(original)
    def inner(*args, **kwargs):
        output, bias = original(*args, **kwargs)
        {act}
        return output, bias

    return inner
"""

KINDS = {
    "harmless": (MLP, HARMLESS),
    "marked": (MLP, MARKED),
    "beside-marked": (FINALIZE, BESIDE_MARKED),
    "at-pp2": (FINALIZE, AT_PP2),
    "after-marked": (MLP, AFTER_MARKED),
    "goes-around": (MLP, GOES_AROUND),
    "raises": (MLP, RAISES),
    "scales": (MLP, AS_WRAP.format(act="output = output * 1.5")),
    "not-finite": (MLP, AS_WRAP.format(act="output = output * float('nan')")),
    "crashes": (MLP, AS_WRAP.format(act="__import__('os').abort()")),
    "hangs": (MLP, AS_WRAP.format(act="__import__('time').sleep(600)")),
    "marked-attention": (ATTENTION, MARKED),
    "after-marked-attention": (ATTENTION, AFTER_MARKED),
    "harmless-projection": (PROJECTION, HARMLESS),
    "goes-around-projection": (PROJECTION, GOES_AROUND),
}


def install(folder: Path, features: Iterable[tuple[str, str]]) -> None:
    """Write a distribution whose features, by name, are of these kinds."""
    entries = []
    for name, kind in features:
        target, glue = KINDS[kind]
        module, cls = f"planted_{name.replace('-', '_')}", "".join(map(str.capitalize, name.split("-")))
        text = FEATURE.format(name=cls, entry=name, target=target, module=module, glue=glue)
        (folder / f"{module}.py").write_text(text)
        entries.append(f"{name} = {module}:{cls}\n")
    info = folder / "planted_ms-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-ms\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mindspeed.features]\n{''.join(entries)}")
