"""The rotary embedding against Megatron's own function, with every option of the Megatron at hand."""

import json

import pytest
from packaging.version import Version

from mindspeed.engine.inspection.megatron_copies import version_of
from tests.megatron.versions.conftest import Megatron

pytestmark = pytest.mark.long


def test_the_rotary_embedding_is_megatrons_with_every_option(megatron: Megatron) -> None:
    largest = json.loads(megatron.run("-m", "tests.megatron.versions.rotary_calls").splitlines()[-1])
    assert max(largest.values()) < 1e-12
    version = version_of(megatron.folder / "megatron")
    assert version is not None
    assert ("inverse mla_output_remove_interleaving" in largest) == (Version(version) >= Version("0.20"))
