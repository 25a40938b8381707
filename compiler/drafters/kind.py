"""What a kind of drafter is: one object, by which the compiler, training and the command line know it.

A kind is a folder of this package, and its object stands in the folder's ``__init__``. Commands ask it for their
flags before any work begins, so importing it costs nothing; its methods import what they need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from draftwood.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM

    from draftwood.compiler.device.table import DraftCost
    from draftwood.compiler.drafters.model import DraftModel, OpenedDrafter
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.compiler.teachers.config import TeacherConfig
    from draftwood.compiler.training.student import Student


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """What can be chosen of a kind in training; on the command line a flag of the same name."""

    help: str
    # The usual choice.
    default: Any = None
    # Reads one value; None makes it a switch, which is off by default.
    read: Callable[[str], Any] | None = int
    # How many values it takes where that is not one, and what a value is called.
    count: int | None = None
    value: str | None = None
    # The least value that makes sense.
    least: float | None = None


class Folder(NamedTuple):
    """What a drafter's folder is made of: config.json, and a file of tensors by key."""

    fields: dict[str, Any]
    tensors: dict[str, Tensor]
    file: str = "model.safetensors"


class Kind(ABC):
    """A kind of drafter."""

    # What manifests and command lines call it.
    name: ClassVar[str]
    # What people call one, with its article.
    title: ClassVar[str]
    # What a folder or file of it holds, said to those who named something else.
    layout: ClassVar[str]
    # The file of its tensors, where we write one.
    weights_file: ClassVar[str] = "model.safetensors"
    # The field of config.json that describes the network without its tensors; None where they decide.
    described_by: ClassVar[str | None] = None
    # Those of it whose candidates depend on the nodes above them, with their article; None where there are none.
    follows_nodes: ClassVar[str | None] = None
    # What can be chosen in training, by name.
    options: ClassVar[Mapping[str, Option]] = {}
    # The sizes that follow the name where its cost on a device is modelled; None where no cost is known.
    cost_sizes: ClassVar[str | None] = None

    @abstractmethod
    def recognises(self, path: Path, fields: Mapping[str, Any]) -> bool:
        """Whether ``path`` holds such a drafter; ``fields`` are those of the config.json there, if any."""

    @abstractmethod
    def open(self, path: Path, teacher: Checkpoint) -> OpenedDrafter:
        """Opens a folder or file; CheckpointError where it does not fit the teacher."""

    def describe(self, path: Path) -> OpenedDrafter:
        """The drafter of a folder's config.json, its weights unread; asked only of a kind with ``described_by``."""
        raise NotImplementedError(self.name)

    @abstractmethod
    def model(self, config: Mapping[str, Any]) -> DraftModel:
        """The draft model whose sizes a manifest gives."""

    def complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a training, with the usual choice for what is not given.

        Raises:
            RequestError: an option is not of this kind, or its value makes no sense.
        """
        if foreign := sorted(options.keys() - self.options.keys()):
            raise RequestError(f"{foreign[0]}: not an option of {self.name}; expected {', '.join(self.options)}")
        chosen = {name: options.get(name, option.default) for name, option in self.options.items()}
        for name, option in self.options.items():
            if chosen[name] is not None and option.least is not None and chosen[name] < option.least:
                raise RequestError(f"{name} is {chosen[name]}; expected {option.least} or more")
        return chosen

    def student(self, teacher: LlamaForCausalLM, options: Mapping[str, Any], ids_V: Tensor | None) -> Student:
        """A drafter to be trained; options are complete, ``ids_V`` are the teacher's ids that it may propose."""
        raise RequestError(f"{self.name}: {self.title} cannot be trained here")

    def trained(self, folder: Path, teacher: LlamaForCausalLM, levels: int | None) -> tuple[Student, dict[str, Tensor]]:
        """A student as large as the drafter of a folder, and its values by name.

        ``levels`` is how far to draft where nothing in the drafter says so.

        Raises:
            CheckpointError: the folder holds no drafter of this kind that was trained here.
        """
        raise RequestError(f"{self.name}: {self.title} cannot be read back for counting")

    def exported(
        self, opened: OpenedDrafter, teacher: Checkpoint, layout: str, tokens: int | None, verifier: str
    ) -> Folder:
        """A drafter in another engine's ``layout``.

        Where the layout says so, it drafts so many ``tokens`` a step for the teacher called ``verifier``.

        Raises:
            RequestError: nobody serves such drafters, or the layout has no form of what this one has.
        """
        raise RequestError(f"{layout}: no other engine serves {self.title}, so no layout of it is written")

    def cost(self, sizes: Sequence[str], teacher: TeacherConfig) -> DraftCost | None:
        """The cost of a drafter of such sizes, which ``cost_sizes`` describes; None where they make no sense."""
        return None
