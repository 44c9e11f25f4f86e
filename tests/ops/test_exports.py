import subprocess
import sys
from types import FunctionType, ModuleType

import pytest

import mindspeed.ops
from mindspeed.ops import ALIASES, OPERATORS
from mindspeed.ops.variants import has_variant, native_variants, python_variants, variants


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout.strip()


def test_naming_the_package_and_its_variants_does_not_import_torch():
    code = (
        "import sys, mindspeed.ops, mindspeed.ops.variants as v; v.has_variant('swiglu', 'npu'); print('torch' in sys.modules)"
    )
    assert run(code) == "False"


@pytest.mark.parametrize(
    "imports",
    [
        "from mindspeed.ops import swiglu",
        pytest.param("import mindspeed.ops.swiglu; from mindspeed.ops import swiglu", marks=pytest.mark.long),
        pytest.param("from mindspeed.ops.swiglu import swiglu; from mindspeed.ops import swiglu", marks=pytest.mark.long),
    ],
)
def test_an_operator_is_its_function_whichever_import_came_first(imports):
    assert run(f"{imports}; print(type(swiglu).__name__)") == "function"


def test_every_operator_is_exported():
    functions = [name for name in (*OPERATORS, *ALIASES) if name != "lcal_coc"]
    assert all(isinstance(getattr(mindspeed.ops, name), FunctionType) for name in functions)
    assert isinstance(mindspeed.ops.lcal_coc, ModuleType)
    assert {*OPERATORS, *ALIASES} <= set(dir(mindspeed.ops))
    assert len(OPERATORS) == 20


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError) as error:
        mindspeed.ops.layer_norm  # noqa: B018
    assert str(error.value) == "module 'mindspeed.ops' has no attribute 'layer_norm'"


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Empty folders of Python variants and of C++ sources."""
    for name, folder in {"_OPS": tmp_path / "ops", "SOURCES": tmp_path / "csrc"}.items():
        monkeypatch.setattr(f"mindspeed.ops.variants.{name}", folder)
        for platform in ("cpu", "npu"):
            (folder / platform).mkdir(parents=True)
    forget()
    yield tmp_path
    forget()


def forget():
    python_variants.cache_clear()
    native_variants.cache_clear()


def test_a_file_under_the_platform_is_a_variant(folders):
    for name in ("ops/npu/swiglu.py", "ops/npu/__init__.py", "csrc/cpu/rms_norm.cpp", "csrc/cpu/table.h"):
        (folders / name).touch()
    assert variants("npu") == {"swiglu"}
    assert variants("cpu") == {"rms_norm"}
    assert has_variant("swiglu", "npu")
    assert not has_variant("swiglu", "cpu")
