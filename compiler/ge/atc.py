"""How ATC, CANN's offline compiler, turns an ``.air`` file into an ``.om``.

Option names and defaults: the ATC guide of GE's open source (docs/zh/user_guides/atc_tools/CLI_options).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import PurePosixPath

from draftwood.manifest import File

# Set for ATC, which otherwise leaves fusion_result.json, and a failed run's kernels and weights, in the folder where it
# runs: a bundle does not open with files that its manifest does not list.
WORK_PATH = 'ASCEND_WORK_PATH="$PWD/om"'
# The usual chip, as Ascend/pytorch spells it (torch_npu/csrc/core/npu/NpuVariables.cpp).
SOC = "Ascend910B3"


def atc_command(air: str, soc: str, packed: bool = False) -> list[str]:
    """The exact command for one graph, to be run in the folder of the ``.air`` files.

    ``origin`` keeps bf16: ATC's default turns it, and fp32, into fp16. Weights stay their own files, which ATC names by
    content, so that all graphs compiled into one folder share them. Tiling is kept on the device. Sums over ``packed``
    weights are deterministic: else a kernel adds their groups up in any order. All options are in ATC since 8.5.0.
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
        *(["--deterministic=1"] if packed else []),
    ]


def atc_script(
    airs: Iterable[str], packed: bool = False, linked: Mapping[str, File] | None = None, later: str = ""
) -> str:
    """A shell script that compiles every graph for the usual chip, or for the one that ``SOC_VERSION`` names.

    Images of vllm-ascend set that variable to a name in lower case, which ATC does not know. ATC names no graph while
    it compiles, so the script does. ATC reads ``linked`` weights in the checkpoint's own files, which must be those of
    the build; ``later`` is the weights file that bind writes, if the build wrote none. The last file that the script
    writes names the bundle and the chip of the ``.om`` files; the engine that runs them reads it.
    """
    same = [f"{file.sha256}  {path}" for path, file in (linked or {}).items()]
    changed = "the checkpoint has changed since the bundle was built: put its files back, or build the bundle again"
    named = "ATC takes no path with other characters than letters, digits, - . and _"
    unbound = "the bundle was built without weights: draftwood bind BUNDLE MODEL gives them, and comes first"
    lines = [
        "#!/bin/sh",
        "# Compiles every graph of this folder with CANN's ATC; needs the chip's ops package, not the chip.",
        f'set -eu; CDPATH= cd "$(dirname "$0")"; soc=${{SOC_VERSION:-{SOC}}}',
        "command -v atc >/dev/null || {",
        '    echo "$0: atc is not on the path; source CANN\'s set_env.sh first" >&2; exit 1',
        "}",
        # Letters beyond ASCII are left to ATC, which takes Chinese ones.
        r"""[ -z "$(pwd -P | LC_ALL=C tr -d 'A-Za-z0-9./_\n\200-\377-')" ] || {""",
        f'    echo "$0: {named}: $(pwd -P); move the bundle" >&2; exit 1',
        "}",
        'case "$soc" in Ascend[0-9]*) ;; *)',
        f'    echo "$0: SOC_VERSION=$soc is no chip of ATC; expected a name such as {SOC}" >&2; exit 1',
        "esac",
        *([f"[ -e {later} ] || {{", f'    echo "$0: {unbound}" >&2; exit 1', "}"] if later else []),
        *(["sha256sum -c - >/dev/null <<'FILES' || {", *same, "FILES"] if same else []),
        *([f'    echo "$0: {changed}" >&2; exit 1', "}"] if same else []),
        f"rm -rf om; mkdir om; export {WORK_PATH}",
        *chain.from_iterable(
            (f'echo "{PurePosixPath(air).name} for $soc"', " ".join(atc_command(air, '"$soc"', packed))) for air in airs
        ),
        '{ sha256sum ../manifest.json; echo "$soc"; } > om/manifest.sha256',
    ]
    return "\n".join(lines) + "\n"
