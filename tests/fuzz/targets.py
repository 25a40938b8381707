"""Readers of a mutated file, as the commands do: a target returns its result, or raises the reader's error.

A result that contradicts itself is `Wrong`: tokens that differ from plain decoding, a tree that breaks an invariant.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import draftwood
from draftwood.compiler.bundle.request import BuildRequest, check_request
from draftwood.compiler.bundle.staging import staged
from draftwood.compiler.checkpoints.safetensors_file import is_finite
from draftwood.compiler.drafters.registry import open_drafter
from draftwood.compiler.ge import weights as compiled
from draftwood.compiler.ge.weights import map_npu_weights
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.conversion import Precision, in_precision
from draftwood.compiler.teachers.formats import write_tokenizer
from draftwood.errors import RequestError, UserError
from draftwood.manifest import CORPUS_FILE
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.bundle.weights import check_values, read_index
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.opened import prompt_ids
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.runtime.trace import Trace
from draftwood.runtime.tuned import tuned_file, tuned_times
from draftwood.tests.tree_texts import written
from draftwood.tools.commands.arguments import given_prompt
from draftwood.tools.commands.calibrate import figures
from draftwood.tools.commands.plan import read_latency
from draftwood.tools.prompts import read_prompts
from draftwood.tools.tokenizers import tokenizer_of
from draftwood.tools.training.rows import read_data
from draftwood.trees import Topology, parse_specs, parse_tree, require, tensorize
from draftwood.trees.calibration import Calibration
from draftwood.trees.calibration_file import read_calibration
from draftwood.trees.formats import read_text
from draftwood.trees.frozen import thaw
from draftwood.trees.plan import make_plan
from draftwood.trees.plan_file import Limits
from draftwood.trees.spec import Budget, read_specs

PROMPT = (5, 9, 23, 40, 9, 23)
NEW_TOKENS = 10
# Of a packed teacher, and whether an NPU's kernel reads it.
PRECISIONS: tuple[tuple[Precision, bool], ...] = (("exact", False), ("nbits", False), ("nbits", True), ("w8a8", False))
# Templates that work, that try to get out of the sandbox, and that try never to end or to fill the memory.
TEMPLATES = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m.content }}{% endfor %}",
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages | tojson }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(300) %}{% for b in range(300) %}{{ 'x' * 99999 }}{% endfor %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for a in range(99999) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% macro m(d) %}{{ m(d - 1) }}{{ m(d - 1) }}{% endmacro %}{{ m(40) }}",
    "{{ 'x' * 10 ** 12 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ '%999999999999d' % 1 }}",
    "{{ 'a' | center(10 ** 12) }}",
    "{{ 'a' | indent(10 ** 10) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ self._TemplateReference__context.environment.globals }}",
    "{{ lipsum(n=9999999) }}",
    "{% include 'etc/passwd' %}",
    "{{ range(10 ** 9) | list | length }}",
    "{{ messages | map(attribute='content') | join | wordwrap(0) }}",
    "{{ strftime_now('%' * 100000) }}",
    "{{ ([1] * 99999) | sort | batch(3) | list | length }}",
    "{% for a in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
)


class Wrong(Exception):
    """A reader accepted something and then contradicted itself."""


def bundle(folder: Path, rng: random.Random) -> str:
    """Opens a bundle and decodes with every gear: the same text or the same refusal as plain decoding."""
    with draftwood.open(folder, engine="static" if rng.random() < 0.3 else "cpu", threads=1) as opened:
        bundle, engine = opened.bundle, opened.engine
        if bundle.tokenizer is not None:
            bundle.tokenizer.decode(bundle.tokenizer.encode("the cat"))
        plain = _text(engine, bundle, None)
        for gear in bundle.manifest.gears:
            if (gear.draft or gear.looks_up) and (found := _text(engine, bundle, gear.name)) != plain:
                raise Wrong(f"gear {gear.name}: {found}, plain decoding: {plain}")
    if isinstance(plain, str):
        raise UserError(plain)
    return f"{len(plain)} tokens"


def _prompt(opened: Bundle) -> list[int]:
    return [i % opened.manifest.dims.vocabulary for i in PROMPT]


def _text(engine: Engine, opened: Bundle, gear: str | None) -> list[int] | str:
    """The tokens, or "refused" if decoding says that it cannot."""
    options = Options(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    try:
        return list(Decoding(engine, _prompt(opened), options, FixedTree(opened, gear)).run().token_ids)
    except UserError as error:
        return "refused" if "fails as it runs" not in str(error) else f"refused: {error}"


def trees(folder: Path, rng: random.Random) -> str:
    """Reads every tree file, in every way that the command line knows."""
    found = []
    for path in sorted(folder.glob("*")) or [folder / "missing.json"]:
        found += [_refusal(_of_spec, spec) for spec in (f"tree:{path}", f"medusa:{path}", f"medusa:{path}#two")]
        found.append(_refusal(_of_file, str(path)))
    refused = [error for error in found if error is not None]
    if len(refused) == len(found):  # several readings are one case: it ran if one did
        raise refused[0]
    return f"{len(found) - len(refused)} of {len(found)} readings"


def _of_spec(spec: str) -> list[Topology | Budget]:
    return [tree for _, tree in parse_specs(spec)]


def _of_file(path: str) -> list[Topology | Budget]:
    return [parse_tree(read_text(Path(path)), path)]


def _refusal(read: Callable[[str], list[Topology | Budget]], name: str) -> UserError | None:
    """The message with which a reader of trees refused, if it did."""
    try:
        for tree in read(name):
            _sound(tree)
    except UserError as error:
        str(error)
        return error
    return None


def _sound(tree: object) -> None:
    assert isinstance(tree, Topology)
    if tree.rows <= 300:
        require(tensorize(tree), "a tree that was read")
        if parse_tree(written(tree, "draftwood"), "again") != tree:
            raise Wrong("a tree is another when it is written and read again")


def frozen(folder: Path, rng: random.Random) -> str:
    """Reads a bundle's own form of a tree."""
    path = folder / "frozen.json"
    topology, buffers = thaw(read_text(path), str(path))
    _sound(topology)
    require(buffers, "buffers that were read")
    return f"{topology.rows} rows"


def plan(folder: Path, rng: random.Random) -> str:
    """Takes the trees of a plan."""
    found = parse_specs(f"plan:{folder / 'plan.json'}")
    for _, tree in found:
        _sound(tree)
    return f"{len(found)} trees"


def statistics(folder: Path, rng: random.Random) -> str:
    """Reads statistics, sums them up, writes them, plans with them."""
    found = read_calibration(folder / "statistics.cal")
    _counted(found)
    return f"{found.contexts.total} contexts"


def _counted(calibration: Calibration) -> None:
    figures(calibration)
    if calibration.contexts.total and calibration.contexts.depth:
        make_plan(calibration, Limits(5, 3, 3, 2))
    if Calibration.from_bytes(calibration.to_bytes()) != calibration:
        raise Wrong("statistics are others when they are written and read again")


def latency(folder: Path, rng: random.Random) -> str:
    """Reads a latency table and plans with it."""
    table = read_latency(folder / "latency.json")
    make_plan(read_calibration(folder / "statistics.cal"), Limits(5, 3, 3, 2), table)
    return f"{len(table.entries)} entries"


def rows(folder: Path, rng: random.Random) -> str:
    """The rows that distill takes prompts from."""
    return f"{len(read_data([str(folder / 'rows.jsonl')]))} rows"


def prompts(folder: Path, rng: random.Random) -> str:
    """Reads a prompt file."""
    return f"{len(read_prompts(folder / 'prompts.jsonl'))} prompts"


def chat(folder: Path, rng: random.Random) -> str:
    """Gives a bundle the messages of a file, as ``run --chat`` does."""
    opened = Bundle.open(folder.parent / "bundle", "fast")
    asked = argparse.Namespace(bundle=opened.folder, prompt_ids=None, prompt=None, chat=str(folder / "chat.json"))
    return f"{len(prompt_ids(opened, given_prompt(asked)))} tokens"


def trace(folder: Path, rng: random.Random) -> str:
    """Reads a trace, sums it up, and writes it in both forms."""
    path = folder / "trace.jsonl"
    found = Trace.read(path)
    found.chrome(folder / "chrome.json")
    found.write(folder / "again.jsonl")
    if Trace.read(folder / "again.jsonl").events != found.events:
        raise Wrong("a trace is another when it is written and read again")
    return f"{len(found.events)} events"


def corpus(folder: Path, rng: random.Random) -> str:
    """Takes an operator's text to look up in as ``build`` does, or decodes with the bundle that holds it."""
    if rng.random() < 0.5:
        return bundle(folder, rng)
    trees, text = read_specs("lookup:chain:3").trees, folder / CORPUS_FILE
    asked = BuildRequest(model=folder.parent / "teacher", drafter=None, trees=trees, slots=(128,), corpus=text)
    check_request(asked, folder / "out")
    return "taken"


def teacher(folder: Path, rng: random.Random) -> str:
    """Opens a teacher and reads every weight."""
    checkpoint = Checkpoint.open(folder)
    for name in checkpoint.names():
        checkpoint.weight(name)
    checkpoint.digest()
    return f"{len(checkpoint.entries)} tensors"


def gguf(folder: Path, rng: random.Random) -> str:
    """Opens a GGUF file, reads every weight in a precision, and its tokenizer."""
    tokenizer_of(folder)
    return layout(folder, rng)


def layout(folder: Path, rng: random.Random) -> str:
    """Opens a quantised teacher and reads every weight in one of the precisions that a bundle may keep it in."""
    checkpoint = Checkpoint.open(folder)
    precision, npu = rng.choice(PRECISIONS) if checkpoint.packed else PRECISIONS[0]
    found = in_precision(checkpoint, precision, npu)
    for name in found.names():
        if not is_finite(found.weight(name)):
            raise Wrong(f"{precision}: {name} is no number everywhere")
    found.digest()
    return f"{len(found.names())} weights, {precision}"


def tuned(folder: Path, rng: random.Random) -> str:
    """Looks for the step times of a bundle whose file is the wrong one: it has none, or possible ones."""
    opened = Bundle.open(folder.parent / "bundle", "fast")
    path = tuned_file(opened, "cpu", 1)
    path.parent.mkdir(parents=True)
    with suppress(FileNotFoundError):  # no file is a wrong one, too
        (folder / "tuned.json").rename(path)
    found = tuned_times(opened, "cpu", 1)
    if found and {time.gear for time in found} != {gear.name for gear in opened.manifest.gears}:
        raise Wrong("times of other gears")
    return f"{len(found)} times"


def lock(folder: Path, rng: random.Random) -> str:
    """Makes a folder whose lock's name is already taken."""
    victim = (folder / "victim").read_bytes()
    try:
        with staged(folder / "out") as made:
            (made / "whole").touch()
    except RequestError:
        if (folder / "out").exists():
            raise Wrong("a folder that was refused is there") from None
        raise
    finally:
        if (folder / "victim").read_bytes() != victim:
            raise Wrong("the lock overwrote its target")
    return "made"


def drafter(folder: Path, rng: random.Random) -> str:
    """Opens a drafter with a right teacher and reads every weight."""
    opened = open_drafter(folder, Checkpoint.open(folder.parent / "teacher"))
    for name in opened.checkpoint.names():
        opened.checkpoint.weight(name)
    opened.digest()
    return opened.model.kind


def npu_weights(folder: Path, rng: random.Random) -> str:
    """Reads the weights of an NPU's graphs, as opening a bundle does and as an engine does."""
    index, stored = folder / "weights.json", folder / "weights.bin"
    for path, tensors in read_index(index, stored).items():
        check_values(path, tensors, 100)
    return f"{len(map_npu_weights(folder, compiled.read_index(index)))} tensors"


def written_tokenizer(folder: Path, rng: random.Random) -> str:
    """Writes a checkpoint's tokenizer as a bundle has it, and uses the result."""
    (folder / "made").mkdir()
    write_tokenizer(folder, folder / "made")
    return tokenizer(folder / "made", rng)


def tokenizer(folder: Path, rng: random.Random) -> str:
    """Opens a tokenizer with its chat template, and goes from text to ids and back."""
    text = Tokenizer.load(folder)
    ids = text.encode("the cat <|user|> é\U0001f600 123\n\n")
    text.decode(ids[:1000])
    [text.spelling(i) for i in (*ids[:20], 0, 10**6)]
    if text.has_chat:
        text.chat([{"role": "user", "content": "the cat"}])
    return f"{len(ids)} ids"
