"""Besides a loaded torch_npu, which has kernels for its device alone, ours compute on a CPU's tensors."""

from collections.abc import Callable
from pathlib import Path

import pytest

from draftwood.environment import torch_npu_installed
from draftwood.kernels import NPU_CONTRACTS
from draftwood.tools.doctor.npu_report import PIECES

# As torch_npu registers its operators (codegen/templates/CustomRegisterSchema.cpp of v2.9.0-7.3.0).
LOADED = """
import torch

def device_only(*values, **options):
    raise AssertionError("the kernel of the device ran on a CPU")

libraries = []
for schema in {schemas!r}:
    library = torch.library.Library("npu", "FRAGMENT")
    library.define(schema)
    library.impl(schema.partition("(")[0], device_only, "PrivateUse1")
    libraries.append(library)

import draftwood.kernels

for contract in draftwood.kernels.NPU_CONTRACTS:
    torch.library.register_fake("npu::" + contract.name, contract.fake)
"""
PROBED = """
from draftwood.tools.doctor.npu_probe import verdict

for name in {names!r}:
    told = verdict(name, "cpu", made=lambda module: module)
    print(name, told.works, told.seen)
"""


# Compiled as for a device, whose tensors are a CPU's here.
CHECKED = """
from pathlib import Path
import numpy as np
from msgspec.structs import replace
from draftwood.compiler.targets.online import TorchairExecutor
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines import npu
from draftwood.tools.comparison.check import check

npu.npu_chips = lambda: ("Ascend910B3",)
npu._executor = lambda bundle, name: TorchairExecutor(bundle.folder, bundle.manifest, "cpu", eagerly=True)
bundle = Bundle.open(Path({folder!r}))
# The acceptance of two rows, a fifth of all that is compiled, is that of seven.
manifest = replace(bundle.manifest, gears=bundle.manifest.gears[1:])
bundle = Bundle(bundle.folder, manifest, bundle.trees, bundle.files, bundle.verified)
found = check(bundle, [np.arange(20)], engine="npu")
assert {{one["graph"] for one in found["comparisons"]}} >= {{"prefill-t16-kv128", "verify-t7-kv128", "draft"}}
assert found["comparisons"] and found["mutations"]  # and all caught, or it were not ok
print(found["ok"])
"""


def loaded(code: str, **words: object) -> str:
    return (LOADED + code).format(schemas=[contract.schema for contract in NPU_CONTRACTS], **words)


@pytest.mark.skipif(not torch_npu_installed(), reason="needs the torch_npu package, which holds torchair's converters")
def test_check_of_the_engine_for_a_device_runs_whole(python: Callable[..., str], npu_bundle: Path) -> None:
    """Line 4 of the ten commands, its faults included."""
    assert python(loaded(CHECKED, folder=str(npu_bundle))).splitlines()[-1] == "True"


def test_every_probe_has_a_reference(python: Callable[..., str]) -> None:
    assert python(loaded(PROBED, names=PIECES)).splitlines() == [f"{name} True as on the host" for name in PIECES]
