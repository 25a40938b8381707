"""Messages between the server's process and an engine's process, over one socket.

A message is four bytes of length, most significant first, and so many bytes of MessagePack.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from draftwood.errors import RequestError
from draftwood.manifest import UsualSampling
from draftwood.runtime.decoding import Finish
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.options import Asked
from draftwood.runtime.reasoning import ReasoningForm
from draftwood.tools.serve.calls import CallForm

HEAD_BYTES = 4


class EngineArguments(Struct, frozen=True, kw_only=True):
    """The bundle of an engine's process, and how it is opened."""

    bundle: str
    opening: Opening


class WrittenChat(Struct):
    """An object that a chat template takes, in JSON. Whole numbers in it, such as those in the arguments of a call, may
    have more than 64 bits, which MessagePack's have not."""

    json: bytes

    def read(self) -> Any:
        """The object; RequestError if it is nested too deep."""
        try:
            return msgspec.json.decode(self.json)
        except RecursionError:
            raise RequestError("chat: nested too deep") from None


class Ask(Struct, tag=True, kw_only=True):
    """Decode a text. ``prompt``: text, token ids, or a chat."""

    id: int
    prompt: str | list[int] | WrittenChat
    options: Asked
    policy: str
    # Whether every step's tree is wanted.
    steps: bool
    # Whether the model may reason before what the grammar of the options holds.
    reasons: bool = False
    # Texts of one session find the kept parts of each other's prompts if they are decoded in one place; "" is none.
    session: str = ""


class Cancel(Struct, tag=True):
    """Drop a text; it is answered by its end."""

    id: int


class Encode(Struct, tag=True):
    """Turn a prompt into token ids."""

    id: int
    prompt: str | WrittenChat
    special: bool = True


class Ready(Struct, tag=True, kw_only=True):
    """The bundle is proved and warm."""

    context: int
    sampling: UsualSampling = UsualSampling()
    # How calls of tools are written, if the chat template takes any.
    calls: CallForm | None
    # How reasoning is told from an answer, if the vocabulary has marks for it.
    reasoning: ReasoningForm | None


class Reading(Struct, tag=True):
    """A text's prompt and grammar are being read, or have been: until then its own content may end an engine."""

    id: int
    done: bool


class Begun(Struct, tag=True):
    """The prompt is good and has room, and is read now; ``cached_tokens`` of it are known from an ended text.

    ``reasoning``: it is a chat that ends with the mark that begins the model's reasoning.
    """

    id: int
    prompt_tokens: int
    cached_tokens: int
    reasoning: bool = False


class CacheUse(Struct, tag=True):
    """Memory of all texts, told when one was admitted or has ended. It is what the running texts may come to need, and
    the budget for that and for kept ended texts."""

    running_bytes: int
    budget_bytes: int


class TopLogprob(Struct):
    """A token as text, or as ``bytes:\\xe4\\xb8`` if it is part of a character; no ``bytes`` if it is special."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that was drawn, and the likeliest ones at its place, the best first."""

    top_logprobs: list[TopLogprob]


class DraftedStep(Struct, kw_only=True):
    """The draft of a step, for spectators: rows in parent-before-child order, the root first."""

    gear: str
    parents: list[int]
    tokens: list[str]
    # Rows of the accepted path, the root counted.
    accepted: list[int]
    bonus: str
    ms: float
    # Texts that shared the launch.
    texts: int


class Piece(Struct, tag=True, kw_only=True):
    """The result of one step: text that became final (maybe none) and so many tokens."""

    id: int
    text: str
    tokens: int
    # Nodes that were drafted, and those that were accepted.
    drafted: int = 0
    accepted: int = 0
    logprobs: list[TokenLogprob] | None = None
    # Of every token with logprobs: the characters of the text before it.
    offsets: list[int] = []
    step: DraftedStep | None = None


class Ended(Struct, tag=True):
    """A text is finished and its room free."""

    id: int
    finish: Finish


class Busy(Struct, tag=True):
    """A text for which there is no room, while as many as may wait do."""

    id: int


class Refused(Struct, tag=True, kw_only=True):
    """A request that the bundle cannot serve."""

    id: int
    message: str
    param: str | None = None
    code: str | None = None


class Failed(Struct, tag=True):
    """A text that our side could not finish."""

    id: int
    message: str


class Encoded(Struct, tag=True):
    """The tokens of a prompt."""

    id: int
    tokens: list[int]


ToEngine = Ask | Cancel | Encode
# The end of a text.
Last = Ended | Busy | Refused | Failed
# The messages about one text or prompt; one of the last two kinds ends it.
OfText = Reading | Begun | Piece | Last | Encoded
ToServer = Ready | CacheUse | OfText

_encoder = msgspec.msgpack.Encoder()
decode_for_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_for_server = msgspec.msgpack.Decoder(ToServer).decode


def framed(message: ToEngine | ToServer) -> bytes:
    """The message as it goes over the socket."""
    content = _encoder.encode(message)
    return len(content).to_bytes(HEAD_BYTES, "big") + content
