"""Our schemas are torch_npu's, letter by letter, as its library has them; importing it would need CANN."""

import mmap
import re

import pytest
import torch

from draftwood.environment import torch_npu_folder
from draftwood.kernels import CPU_CONTRACTS, NPU_CONTRACTS, Contract, register

CONTRACTS = NPU_CONTRACTS + CPU_CONTRACTS
# C strings "name(arguments) -> results", from one NUL to the next; overloads and .out variants are others.
SCHEMA = re.compile(rb"\x00((?:npu_|scatter_)\w+(?:\.\w+)?\([ -~]*\) -> [ -~]+)\x00")


@pytest.fixture(scope="module")
def stored() -> set[str]:
    folder = torch_npu_folder()  # finds it without importing it, and while the tests hide it
    if folder is None:
        pytest.skip("torch_npu is not installed (extra npu): its schemas cannot be read")
    library = folder / "lib" / "libtorch_npu.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return {match[1].decode() for match in SCHEMA.finditer(data)}


@pytest.mark.parametrize("contract", NPU_CONTRACTS, ids=lambda c: c.name)
def test_schema_is_in_the_library(stored: set[str], contract: Contract) -> None:
    similar = sorted(s for s in stored if s.startswith(f"{contract.name}("))
    assert contract.schema in stored, f"the library has {similar or 'nothing'} of this name"


def test_a_changed_schema_is_missed(stored: set[str]) -> None:
    changed = NPU_CONTRACTS[0].schema.replace("epsilon", "eps")
    assert changed != NPU_CONTRACTS[0].schema and changed not in stored


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.name)
def test_schema_is_registered(contract: Contract) -> None:
    # Both sides through torch's parser and printer, so that quotes and number forms do not count.
    wanted = torch._C.parse_schema(f"{contract.namespace}::{contract.schema}")
    assert str(contract.operator._schema) == str(wanted)


def test_registering_again_changes_nothing() -> None:
    before = [contract.operator for contract in CONTRACTS]
    register(CONTRACTS)
    assert [contract.operator for contract in CONTRACTS] == before
