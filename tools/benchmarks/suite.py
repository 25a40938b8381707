"""Suites: the measurements, as data. A file in ``suites/`` or the user's own, in TOML."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from draftwood.errors import RequestError
from draftwood.files import absolute_path, read_text, real_path
from draftwood.manifest import Manifest
from draftwood.planned import Count, Size
from draftwood.tools.benchmarks.named_bundles import NamedBundle
from draftwood.tools.benchmarks.peers import PEERS
from draftwood.tools.prompts import split_family

FOLDER = Path(__file__).parent / "suites"


POLICIES = ("adaptive", "tree", "plain")


class SectionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one section; one that a section does not read has no effect.

    Raises:
        ValueError: a policy or a program that there is not.
    """

    # The measured bundles, by name; all that the section can measure if none is named.
    bundles: tuple[str, ...] = ()
    temperatures: tuple[Annotated[float, msgspec.Meta(ge=0, le=100)], ...] = (0.0,)
    # "adaptive", "plain" or "tree": the largest tree of the bundle, always.
    policies: tuple[str, ...] = ("tree",)
    # Tokens of text before the answer.
    lengths: tuple[Size, ...] = ()
    # Conversations, or texts of a length; None takes all.
    limit: Size | None = None
    max_new_tokens: Size = 64
    rounds: Size = 3
    # Texts that share launches.
    texts: tuple[Size, ...] = ()
    # Other programs, by their names; all known ones if none is named.
    peers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check("policies", self.policies, POLICIES)
        _check("peers", self.peers, tuple(PEERS))


class Suite(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sections by name, in the order in which they are measured."""

    name: str
    sections: dict[str, SectionSettings]
    # Foreign processor time and steal that a task may see, in cores; above it the task is measured again.
    busy_cores: Annotated[float, msgspec.Meta(ge=0)] = 0.08
    # Times a task is measured at most; the last one is kept, and marked.
    tries: Size = 3
    seed: Count = 1
    # Prompt files, each FILE or FAMILY=FILE; the built-in prompts if none is given.
    prompts: tuple[str, ...] = ()
    # The subject: bundles of one teacher by name, and the engine that runs them; None for the default one.
    bundles: dict[str, str] = {}
    engine: str | None = None
    # The teacher's name in tables, and its checkpoint, which other programs read; None if none is given.
    model: str = ""
    checkpoint: str | None = None

    def only(self, sections: Sequence[str], prompts: Sequence[str]) -> Suite:
        """The suite with these of its sections, if any are named, and with other prompt files, if any are.

        Raises:
            RequestError: a section that it does not have.
        """
        if strange := [name for name in sections if name not in self.sections]:
            raise RequestError(f"--sections {strange[0]}: suite {self.name} has {', '.join(self.sections)}")
        chosen = {name: ask for name, ask in self.sections.items() if not sections or name in sections}
        files = tuple(_resolved(prompt) for prompt in prompts) or self.prompts
        return msgspec.structs.replace(self, sections=chosen, prompts=files)

    def over(
        self,
        bundles: Mapping[str, NamedBundle],
        takes: Callable[[str, Manifest], bool],
        engine: str | None,
        model: Path | None,
    ) -> Suite:
        """The suite over these bundles, with lengths that all of them hold.

        Args:
            takes: whether a section, by its name, measures a bundle; one that measures none is left out.
            model: the teacher's checkpoint.

        Raises:
            RequestError: a section asks for another bundle, or no section is left.
        """
        manifests = [bundle.manifest for bundle in bundles.values()]
        context = min(manifest.dims.context for manifest in manifests)
        asks = {}
        for name, ask in self.sections.items():
            if strange := [bundle for bundle in ask.bundles if bundle not in bundles]:
                raise RequestError(f"suite {self.name}: {name} asks for bundle {strange[0]!r}; give it as --bundle")
            lengths = tuple(length for length in ask.lengths if length + ask.max_new_tokens <= context)
            measured = tuple(bundle for bundle in ask.bundles or bundles if takes(name, bundles[bundle].manifest))
            if measured and (lengths or not ask.lengths):
                asks[name] = msgspec.structs.replace(ask, bundles=measured, lengths=lengths)
        if not asks:
            raise RequestError(f"--bundle: suite {self.name} has no section that measures it; expected turns, say")
        return msgspec.structs.replace(
            self,
            sections=asks,
            bundles={name: bundle.folder for name, bundle in bundles.items()},
            engine=engine,
            model=model.stem if model else manifests[0].teacher.config["family"],
            checkpoint=str(absolute_path(model)) if model else None,
        )

    def builtins(self) -> dict[str, Any]:
        """The suite as JSON has it."""
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return plain


def _check(name: str, values: Sequence[str], known: Sequence[str]) -> None:
    if strange := [value for value in values if value not in known]:
        raise ValueError(f"{name}: {strange[0]!r} is none of {', '.join(known)}")


def _resolved(spec: str) -> str:
    """A prompt file, with its family, wherever the run goes on from."""
    family, path = split_family(spec)
    return f"{family}={real_path(path)}" if family else str(real_path(path))


def read_suite(name: str, known: Collection[str]) -> Suite:
    """A suite by its name or its file; ``known`` are the sections there are.

    Raises:
        RequestError: no such suite, a file that is none, or one that names another section.
    """
    shipped = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}
    path = shipped.get(name, Path(name))
    try:
        suite = msgspec.toml.decode(read_text(path).encode(), type=Suite, strict=True)
    except OSError as error:
        raise RequestError(f"--suite {name}: {error.strerror}; expected {', '.join(shipped)} or a TOML file") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RequestError(f"--suite {path}: {error}") from error
    if strange := [section for section in suite.sections if section not in known]:
        raise RequestError(f"--suite {path}: no section {strange[0]!r}; expected some of {', '.join(known)}")
    return suite
