"""The names ``demo`` and ``shape:NAME``: a language model that is downloaded, and configurations."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from draftwood.errors import BundleError, RequestError
from draftwood.files import cache_home
from draftwood.manifest import read_manifest

FOLDER = Path(__file__).parent
# SmolLM2 wherever a model is asked for, and the bundle that ``draftwood demo`` built of it wherever a bundle is.
NAME = "demo"
# Drafters of SmolLM2 that are shipped (their model card lies next to them).
DRAFTERS = {f"{NAME}-{path.parent.name}": path.parent for path in sorted(FOLDER.glob("*/config.json"))}
# The beginning of its bundles' folder names, in the user's cache.
KEPT = "demo-smollm2"
# Configurations without weights: "shape:llama-3.1-8b".
SHAPES = {f"shape:{path.parent.name}": path.parent for path in sorted((FOLDER.parent / "shapes").glob("*/config.json"))}


def resolve(name: str) -> Path:
    """The file of ``demo``, which is downloaded the first time, or the folder of one of its drafters or of a shape.
    Anything else, and a folder of that name, is taken as a path.

    Raises:
        RequestError: a shape that is not shipped, or a model that cannot be downloaded.
    """
    if name == NAME and not Path(NAME).is_dir():
        from draftwood.tools.demo import fetch

        return fetch.model()
    if name.startswith("shape:") and name not in SHAPES:
        raise RequestError(f"{name}: no such shape; expected {', '.join(SHAPES)}")
    if name in DRAFTERS and not Path(name).is_dir():
        return DRAFTERS[name]
    return SHAPES.get(name, Path(name))


def bundle(name: str) -> Path:
    """The folder of a bundle: of ``demo`` the last one that ``draftwood demo`` of this version built.

    Raises:
        RequestError: it has built none.
    """
    if name != NAME or Path(NAME).is_dir():
        return Path(name)
    try:
        bundles = [path.parent for path in (cache_home() / "draftwood").glob(f"{KEPT}-*/manifest.json")]
    except OSError as error:  # no home
        raise RequestError(f"{NAME}: its bundle is in the user's cache, but {error}; set XDG_CACHE_HOME") from error
    for folder in sorted(bundles, key=lambda path: path.stat().st_mtime, reverse=True):
        with suppress(BundleError):  # of another version, or damaged
            read_manifest(folder)
            return folder
    raise RequestError(f"{NAME}: not built yet by this version; draftwood demo builds it, in two minutes")
