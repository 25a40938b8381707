"""How ATC, CANN's offline compiler, turns an ``.air`` file into an ``.om``.

Option names and defaults: the ATC guide of GE's open source (docs/zh/user_guides/atc_tools/CLI_options).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

# As Ascend/pytorch spells them (torch_npu/csrc/core/npu/NpuVariables.cpp).
A2_VERSIONS = ("Ascend910B1", "Ascend910B2", "Ascend910B2C", "Ascend910B3", "Ascend910B4", "Ascend910B4-1")
A3_VERSIONS = (
    *("Ascend910_9391", "Ascend910_9392", "Ascend910_9381", "Ascend910_9382"),
    *("Ascend910_9372", "Ascend910_9362", "Ascend910_9363"),
)
SOC_VERSIONS = A2_VERSIONS + A3_VERSIONS
DEFAULT_SOC = "Ascend910B3"


def atc_command(air: str, soc: str, packed: bool = False) -> list[str]:
    """The exact command for one graph, to be run in the folder of the ``.air`` files.

    ``origin`` keeps bf16: ATC's default turns it, and fp32, into fp16. Weights stay their own files, which ATC names by
    content, so that all graphs compiled into one folder share them. Tiling is kept on the device. Sums over ``packed``
    weights are deterministic: else a kernel adds their groups up in any order.
    """
    name = PurePosixPath(air).name
    return [
        "atc",
        "--framework=1",
        "--mode=0",
        f"--model={name}",
        f"--output=om/{PurePosixPath(name).stem}",
        f"--soc_version={soc}",
        "--precision_mode_v2=origin",
        "--external_weight=1",
        "--tiling_schedule_optimize=1",
        *(["--deterministic=1", "--deterministic_level=1"] if packed else []),
    ]


def atc_script(airs: Iterable[str], soc: str, packed: bool = False) -> str:
    """A shell script that compiles every graph; ``SOC_VERSION`` overrides the chip.

    The last file that it writes names the bundle of the ``.om`` files; the engine that runs them reads it.
    """
    lines = [
        "#!/bin/sh",
        "# Compiles every graph of this folder with CANN's ATC; needs the chip's ops package, not the chip.",
        'set -eu; cd "$(dirname "$0")"',
        "command -v atc >/dev/null || {",
        '    echo "$0: atc is not on the path; source CANN\'s set_env.sh first" >&2; exit 1',
        "}",
        "rm -rf om; mkdir om",
        *(" ".join(atc_command(air, "${SOC_VERSION:-" + soc + "}", packed)) for air in airs),
        "sha256sum ../manifest.json > om/manifest.sha256",
    ]
    return "\n".join(lines) + "\n"
