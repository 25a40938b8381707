"""The kinds of drafter by name: titles, choices in training, and the places of their classes.

Commands list kinds and their flags before any work begins, so nothing here imports torch. A kind's class is imported
when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from draftwood.errors import RequestError

if TYPE_CHECKING:
    from draftwood.compiler.device.table import DraftCost
    from draftwood.compiler.drafters.model import DraftModel


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOption:
    """An option of a kind's training; on the command line it is a flag of that name."""

    help: str
    # The usual choice.
    default: Any = None
    # Reads one value; None makes it a switch, which is off by default.
    read: Callable[[str], Any] | None = int
    # The number of its values if that is not one, and a value's name.
    count: int | None = None
    value: str | tuple[str, ...] | None = None
    # The least value that makes sense.
    least: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    """A kind of drafter, before anything of it is loaded."""

    # Its name in manifests and command lines.
    name: str
    # Its usual name, with an article, for messages.
    title: str
    # The contents of its folder or file, for messages about another one.
    layout: str
    # Its class, a `DraftModel`, as "module:Class".
    source: str
    # Options of training, by name; empty if such drafters cannot be trained here.
    options: Mapping[str, TrainingOption] = field(default_factory=dict)
    # The class of its cost on a device, a `DraftCost`, as "module:Class", and the sizes that follow the kind's name
    # there. None if no cost is known.
    cost_source: str | None = None
    cost_sizes: str = ""

    @property
    def model(self) -> type[DraftModel]:
        """Its class."""
        model: type[DraftModel] = _named(self.source)
        return model

    @property
    def cost(self) -> type[DraftCost] | None:
        """The class of its cost."""
        return None if self.cost_source is None else _named(self.cost_source)

    def complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a training, with the usual choice for those that are not given.

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


def _named(source: str) -> Any:
    module, name = source.split(":")
    return getattr(import_module(module), name)


_HERE = "draftwood.compiler.drafters"
_DRAFT_VOCABULARY = TrainingOption(help="draft only the N most written ids", value="N", least=1)
_SHARED_NOISE = TrainingOption(
    help="on sampled text learn the teacher's draw, with noise that both share", read=None, default=False
)

MEDUSA = Kind(
    name="medusa",
    title="Medusa heads",
    layout="a folder with medusa_lm_head.safetensors or medusa_lm_head.pt, or with the config.json of a Medusa model",
    source=f"{_HERE}.medusa.model:MedusaModel",
    cost_source=f"{_HERE}.medusa.cost:MedusaCost",
    cost_sizes=":HEADS[:tied]",
    options={
        "levels": TrainingOption(help="heads (4)", default=4, least=1),
        "layers": TrainingOption(help="residual blocks a head (1)", default=1, least=1),
        "shared_noise": _SHARED_NOISE,
    },
)
PEAGLE = Kind(
    name="peagle",
    title="a P-EAGLE drafter",
    layout="one with the config.json and the tensors of a P-EAGLE drafter",
    source=f"{_HERE}.peagle.model:PEagleModel",
    cost_source=f"{_HERE}.peagle.cost:PEagleCost",
    cost_sizes=":LEVELS[:LAYERS[:VOCABULARY]]",
)
EAGLE3 = Kind(
    name="eagle3",
    title="an EAGLE-3 drafter",
    layout="one with the config.json and the tensors of an EAGLE-3 drafter",
    source=f"{_HERE}.eagle3.model:Eagle3Model",
    cost_source=f"{_HERE}.eagle3.cost:Eagle3Cost",
    cost_sizes="[:VOCABULARY]",
    options={
        "levels": TrainingOption(help="steps of the training-time test (7)", default=7, least=1),
        "draft_vocab": _DRAFT_VOCABULARY,
        "shared_noise": _SHARED_NOISE,
    },
)
FASTEAGLE = Kind(
    name="fasteagle",
    title="a FastEagle drafter",
    layout="one with the config.json and the tensors of a FastEagle drafter",
    source=f"{_HERE}.fasteagle.model:FastEagleModel",
    cost_source=f"{_HERE}.fasteagle.cost:FastEagleCost",
    cost_sizes=":LAYERS[:VOCABULARY[:HEADS:KV_HEADS:MLP]]",
    options={
        "levels": TrainingOption(help="layers (4)", default=4, least=1),
        "draft_vocab": _DRAFT_VOCABULARY,
        "shared_noise": _SHARED_NOISE,
        "layer_sizes": TrainingOption(
            help="query heads, key/value heads and MLP width of a layer (the teacher's)",
            count=3,
            value=("HEADS", "KV_HEADS", "MLP"),
        ),
    },
)
DSPARK = Kind(
    name="dspark",
    title="a DSpark drafter",
    layout="one with the config.json and the tensors of a DSpark drafter",
    source=f"{_HERE}.dspark.model:DSparkModel",
    cost_source=f"{_HERE}.dspark.cost:DSparkCost",
    cost_sizes=":LEVELS[:LAYERS[:VOCABULARY[:RANK]]]",
    options={
        "levels": TrainingOption(help="rows of the block, each a level (5)", default=5, least=2),
        "layers": TrainingOption(help="layers of the block (1)", default=1, least=1),
        "shared_noise": _SHARED_NOISE,
    },
)
DFLASH = Kind(
    name="dflash",
    title="a DFlash drafter",
    layout="one with the config.json and the tensors of a DFlash drafter",
    source=f"{_HERE}.dflash.model:DFlashModel",
    cost_source=f"{_HERE}.dflash.cost:DFlashCost",
    cost_sizes=":LEVELS[:LAYERS[:VOCABULARY]]",
)
# P-EAGLE before EAGLE-3 and DSpark before DFlash: some of their folders bear the other's name.
SHIPPED = (MEDUSA, PEAGLE, EAGLE3, FASTEAGLE, DSPARK, DFLASH)
