"""Besides a loaded torch_npu, which has kernels for its device alone, ours compute on a CPU's tensors."""

from collections.abc import Callable

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

from draftwood.tools.doctor.npu_probe import verdict

for name in {names!r}:
    told = verdict(name, "cpu", made=lambda module: module)
    print(name, told.works, told.seen)
"""


def test_every_probe_has_a_reference(python: Callable[..., str]) -> None:
    code = LOADED.format(schemas=[contract.schema for contract in NPU_CONTRACTS], names=PIECES)
    assert python(code).splitlines() == [f"{name} True as on the host" for name in PIECES]
