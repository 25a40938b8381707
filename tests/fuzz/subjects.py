"""The subjects of fuzzing: for each its seeds, its mutations, and the reader of the result."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from io import BytesIO
from pathlib import Path

import msgspec

from draftwood import manifest as m
from draftwood.compiler.checkpoints.packing import CONFIG, FILES
from draftwood.tests.fuzz import graphs, seeds, targets
from draftwood.tests.fuzz.mutate import (
    changed,
    damaged,
    dumped,
    gguf_damaged,
    json_damaged,
    json_lines_damaged,
    not_finite,
    replace,
    safetensors_damaged,
    special,
)
from draftwood.tests.packed_checkpoints import LAYOUTS

# A damage to the text or bytes of one file.
Damage = Callable[[bytes, random.Random], bytes]
# Changes a case's folder; describes the change.
Mutate = Callable[[Path, random.Random], str]
CANARY = "CANARY"


@dataclass(frozen=True, slots=True)
class Subject:
    """``seeds`` names folders; one of them is linked into a case; ``share`` is how often it is drawn."""

    name: str
    seeds: tuple[str, ...]
    mutate: Mutate
    target: Callable[[Path, random.Random], str]
    share: int = 1


BUNDLES = ("bundles/medusa", "bundles/eagle3", "bundles/fasteagle")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _one_of(damage: Damage, *patterns: str) -> Mutate:
    """Damages one file among those that match; one time in twelve it becomes something else than a file."""

    def mutate(folder: Path, rng: random.Random) -> str:
        path = rng.choice([path for path in _files(folder) if any(path.match(pattern) for pattern in patterns)])
        if rng.random() < 1 / 12:
            return f"{path.name}: {special(path, rng)}"
        replace(path, damage(path.read_bytes(), rng).replace(CANARY.encode(), _canary(folder)))
        return path.name

    return mutate


def _alone(damage: Damage, *patterns: str) -> Mutate:
    """The subject, and the other files that match are gone: only the damaged one is read."""

    def mutate(folder: Path, rng: random.Random) -> str:
        matching = [path for path in _files(folder) if any(path.match(pattern) for pattern in patterns)]
        kept = rng.choice(matching)
        for path in _files(folder):
            if path != kept:
                path.unlink()
        return _one_of(damage, kept.name)(folder, rng)

    return mutate


def _canary(folder: Path) -> bytes:
    return str(folder.parent / CANARY).encode()


def _damage_of(path: Path) -> Damage:
    if path.suffix == ".json":
        return json_damaged
    return safetensors_damaged if path.suffix == ".safetensors" else damaged


def _any_file(folder: Path, rng: random.Random) -> str:
    path = rng.choice(_files(folder))
    return _one_of(_damage_of(path), path.name)(folder, rng)


def _statistics(data: bytes, rng: random.Random) -> bytes:
    """Calibration statistics whose header is wrong, or whose columns are and whose digest fits them."""
    line, _, columns = data.partition(b"\n")
    if rng.random() < 0.5:
        return json_damaged(line, rng).replace(b"\n", b" ") + b"\n" + columns
    columns = damaged(columns, rng)
    header = json.loads(line) | {"sha256": hashlib.sha256(columns).hexdigest()}
    if len(columns) >= header["rows"] * 10:
        header["ranks"] = len(columns) - header["rows"] * 10
    return json.dumps(header).encode() + b"\n" + columns


def _bundle_files(folder: Path, rng: random.Random) -> str:
    """One file other than a graph is wrong, and the manifest vouches for it."""
    paths = [path for path in _files(folder) if path.suffix != ".onnx" and path.name != m.MANIFEST_FILE]
    path = rng.choice(paths)
    damage = not_finite if path.suffix == ".safetensors" and rng.random() < 0.5 else _damage_of(path)
    replace(path, damage(path.read_bytes(), rng).replace(CANARY.encode(), _canary(folder)))
    return vouched(folder, path)


def _bundle_graph(folder: Path, rng: random.Random) -> str:
    """One graph computes something else, and the manifest vouches for it."""
    path = rng.choice([path for path in _files(folder) if path.suffix == ".onnx"])
    what = graphs.changed(path, rng)
    return f"{what} in {vouched(folder, path)}"


def _bundle_bytes_of_graph(folder: Path, rng: random.Random) -> str:
    """One graph's file is damaged, and the manifest vouches for it."""
    path = rng.choice([path for path in _files(folder) if path.suffix == ".onnx"])
    replace(path, damaged(path.read_bytes(), rng))
    return vouched(folder, path)


def vouched(folder: Path, path: Path) -> str:
    """Rewrites the manifest so that size and hash of a file are right again; gives the file's name."""
    manifest = m.read_manifest(folder)
    name = path.relative_to(folder).as_posix()
    files = manifest.files | {name: m.list_file(path)}
    replace(folder / m.MANIFEST_FILE, m.encode(msgspec.structs.replace(manifest, files=files)))
    return name


def _surplus(folder: Path, rng: random.Random) -> str:
    """A name that the manifest does not list."""
    places = [path for path in (folder, *folder.rglob("*")) if path.is_dir()]
    path = rng.choice(places) / rng.choice(("extra.json", "chat_template.jinja", ".hidden", "weights.bin", "é\n"))
    path.write_bytes(rng.randbytes(30))
    return f"{path.name}: {special(path, rng) if rng.random() < 0.7 else 'surplus'}"


class _Runs:
    """Code that a pickle runs when it is loaded in full."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        import os

        return rng_free_choice(self.path, os)


def rng_free_choice(path: str, os: object) -> tuple[Callable[..., object], tuple[object, ...]]:
    """A call that leaves the canary; which one depends on the path alone."""
    calls = (
        (getattr(os, "system"), (f"touch '{path}'",)),  # noqa: B009
        (exec, (f"open({path!r}, 'w').close()",)),
        (eval, (f"open({path!r}, 'w').close()",)),
        (open, (path, "w")),
    )
    return calls[sum(path.encode()) % len(calls)]


def _torch_files(folder: Path, rng: random.Random) -> str:
    path = next(path for path in _files(folder) if path.suffix in (".pt", ".bin"))
    kind = rng.random()
    if kind < 0.35:
        harmful = pickle.dumps({"0.0.linear.weight": _Runs(_canary(folder).decode())}, protocol=rng.choice((2, 4)))
        replace(path, harmful if rng.random() < 0.4 else _zipped(path.read_bytes(), harmful))
        return "a pickle with code"
    if kind < 0.7:
        replace(path, _zipped(path.read_bytes(), None, rng))
        return "another pickle"
    return _one_of(damaged, "*.pt", "*.bin", "*.json")(folder, rng)


def _zipped(data: bytes, harmful: bytes | None, rng: random.Random | None = None) -> bytes:
    """A torch zip file with another ``data.pkl``, or with that one damaged."""
    out = BytesIO()
    with zipfile.ZipFile(BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("data.pkl"):
                content = harmful if harmful is not None else damaged(content, rng or random.Random(0))
            new.writestr(name, content)
    return out.getvalue()


def _template(folder: Path, rng: random.Random) -> str:
    """A chat template of its own file: damaged, or written to hurt."""
    path = folder / "chat_template.jinja"
    template = rng.choice(targets.TEMPLATES)
    replace(path, (damaged(template.encode(), rng) if rng.random() < 0.6 else template.encode()))
    replace(path, path.read_bytes().replace(CANARY.encode(), _canary(folder)))
    return path.name


# Of modules: right ones, and ones that ``re`` would match for ever or cannot compile.
PATTERNS = (
    *(".*lm_head", r"model\.layers\.\d+\.mlp.*", ".*(q|k|v|o)_proj$", "(.+)+Z", "((a|a)+)+Z", "(?x)(.+) +Z"),
    *(
        ".?" * 60 + "Z",
        ".*" * 12 + "Z",
        "(.|.)" * 60 + "Z",
        "(" * 5000 + ")" * 5000,
        "a{99999999999}",
        "[",
        r"(.*)\1*Z",
    ),
)


def _scheme(folder: Path, rng: random.Random) -> str:
    """A config.json that says it is quantised but for modules that hurt to look for."""
    path = folder / "config.json"
    number = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": number | {"strategy": "channel"},
        "input_activations": number | {"strategy": "token", "dynamic": True},
    }
    chosen = [f"re:{rng.choice(PATTERNS)}" for _ in range(rng.choice((1, 1, 2, 30)))]
    said = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"g": group}}
    replace(
        path, json.dumps(json.loads(path.read_bytes()) | {"quantization_config": said | {"ignore": chosen}}).encode()
    )
    if rng.random() < 0.3:
        replace(path, json_damaged(path.read_bytes(), rng))
    return f"ignore {chosen!r:.100}"


def _layout(folder: Path, rng: random.Random) -> str:
    """A quantised checkpoint whose description is wrong, whose tensors are, or which is described as another."""
    said = _described(folder, rng)
    if said and rng.random() < 0.8:
        return said
    read = ("config.json", "quant_model_description.json", "*.safetensors", "*.index.json")
    path = rng.choice([path for path in _files(folder) if any(path.match(name) for name in read)])
    return f"{said} {_one_of(_damage_of(path), path.name)(folder, rng)}"


def _described(folder: Path, rng: random.Random) -> str:
    """Half of the time, if config.json has a description, damages it or takes another layout's; says which."""
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    if CONFIG not in config or rng.random() < 0.5:
        return ""
    said, layout = config.pop(CONFIG), rng.choice(list(LAYOUTS))
    if damaged_alone := rng.random() < 0.7:
        said = changed(said, rng)
    else:
        said = LAYOUTS[layout][1](rng.choice((4, 8)), rng.choice((-1, 32, 64, 128)), rng.random() < 0.5)
    place = rng.choice((path, *(folder / name for name in FILES)))
    replace(path, dumped(config | ({CONFIG: said} if place == path else {}), rng))
    if place != path:
        place.write_bytes(dumped(said, rng))
    return f"{'damaged' if damaged_alone else layout} in {place.name}"


def _shards(folder: Path, rng: random.Random) -> str:
    """The weights in a shard that the index names and that is damaged, or something else than a file."""
    path, shard = folder / "model.safetensors", folder / "shard.safetensors"
    path.rename(shard)
    names = json.loads(shard.read_bytes()[8 : 8 + int.from_bytes(shard.read_bytes()[:8], "little")])
    placed = {
        name: rng.choice((shard.name,) * 50 + ("..", "", "/dev/zero", ".")) for name in names if name != "__metadata__"
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return special(shard, rng) if rng.random() < 0.7 else _one_of(safetensors_damaged, shard.name)(folder, rng)


def _corpus(folder: Path, rng: random.Random) -> str:
    """A bundle's text to look up in: damaged, with odd pieces, empty, at most a letter too long; or no file."""
    path = folder / m.CORPUS_FILE
    if rng.random() < 1 / 6:
        return special(path, rng)
    pieces = ("\0", "\r", "\x1b[2J", "\ufeff", "\U0010ffff", "<|user|>", "e\u0301" * 99, "x" * 9999)
    data = path.read_bytes()
    at = rng.randrange(len(data))
    odd = data[:at] + rng.choice(pieces).encode() + data[at:]
    long = data.ljust(m.MOST_CORPUS_BYTES + rng.choice((0, 1)), b"x")
    replace(path, rng.choice((damaged(data, rng), damaged(data, rng), odd, odd, b"", long)))
    return vouched(folder, path)


def _lock(folder: Path, rng: random.Random) -> str:
    """Something lies where a build's lock is to be."""
    lock, victim = folder / ".out.lock", folder / "victim"
    victim.write_bytes(rng.randbytes(9))
    kind = rng.choice(("link", "hard link", "other"))
    if kind != "other":
        (lock.symlink_to if kind == "link" else lock.hardlink_to)(victim)
        return kind
    lock.touch()
    return special(lock, rng)


SUBJECTS = (
    Subject("bundle-manifest", BUNDLES, _one_of(json_damaged, m.MANIFEST_FILE), targets.bundle, 5),
    Subject("bundle-bytes", BUNDLES, _any_file, targets.bundle, 2),
    Subject("bundle-files", BUNDLES, _bundle_files, targets.bundle, 3),
    Subject("bundle-names", BUNDLES, _surplus, targets.bundle, 1),
    Subject("bundle-graph", BUNDLES, _bundle_graph, targets.bundle, 1),
    Subject("bundle-graph-bytes", BUNDLES, _bundle_bytes_of_graph, targets.bundle, 1),
    Subject("trees", ("files/trees",), _alone(json_damaged, "[dmn]*.json"), targets.trees, 4),
    Subject("trees-python", ("files/trees",), _alone(damaged, "choices.py", "tuples.json"), targets.trees, 2),
    Subject("trees-frozen", ("files/trees",), _alone(json_damaged, "frozen.json"), targets.frozen, 2),
    Subject("plans", ("files",), _one_of(json_damaged, "plan.json"), targets.plan, 3),
    Subject("statistics", ("files",), _alone(_statistics, "statistics.cal"), targets.statistics, 2),
    Subject("latency", ("files",), _one_of(json_damaged, "latency.json"), targets.latency, 3),
    Subject("prompts", ("files",), _one_of(json_lines_damaged, "prompts.jsonl"), targets.prompts, 2),
    Subject("rows", ("files",), _one_of(json_lines_damaged, "rows.jsonl"), targets.rows, 1),
    Subject("chats", ("files",), _one_of(json_damaged, "chat.json"), targets.chat, 1),
    Subject("corpora", ("bundles/lookup",), _corpus, targets.corpus, 1),
    Subject("traces", ("files",), _one_of(json_lines_damaged, "trace.jsonl"), targets.trace, 2),
    Subject("teacher-config", ("teacher",), _one_of(json_damaged, "config.json"), targets.teacher, 3),
    Subject("teacher-tensors", ("teacher",), _one_of(safetensors_damaged, "*.safetensors"), targets.teacher, 2),
    Subject("teacher-scheme", ("teacher",), _scheme, targets.teacher, 2),
    Subject("teacher-shards", ("teacher",), _shards, targets.teacher, 1),
    *(
        Subject(f"layout-{name}", (f"layouts/{name}", f"layouts/{name}-rows"), _layout, targets.layout)
        for name in LAYOUTS
    ),
    *(Subject(f"layout-{name}", (f"layouts/{name}",), _layout, targets.layout) for name in seeds.INT8),
    Subject("gguf", ("gguf/Q4_1", "gguf/Q8_0"), _one_of(gguf_damaged, "*.gguf"), targets.gguf, 2),
    Subject("sentencepiece", ("sentencepiece",), _one_of(damaged, "*.model"), targets.written_tokenizer, 2),
    Subject("sentencepiece-config", ("sentencepiece",), _one_of(json_damaged, "*.json"), targets.written_tokenizer, 2),
    Subject("tuned", ("tuned",), _one_of(json_damaged, "tuned.json"), targets.tuned, 2),
    Subject("lock", ("tuned",), _lock, targets.lock, 1),
    Subject("medusa", ("medusa",), _one_of(safetensors_damaged, "*.safetensors"), targets.drafter, 2),
    Subject("eagle3-config", ("eagle3",), _one_of(json_damaged, "config.json"), targets.drafter, 2),
    Subject("eagle3-tensors", ("eagle3",), _one_of(safetensors_damaged, "*.safetensors"), targets.drafter, 2),
    Subject("fasteagle-config", ("fasteagle",), _one_of(json_damaged, "config.json"), targets.drafter, 2),
    Subject("fasteagle-tensors", ("fasteagle",), _one_of(safetensors_damaged, "*.safetensors"), targets.drafter, 1),
    Subject("peagle-config", ("peagle",), _one_of(json_damaged, "config.json"), targets.drafter, 1),
    Subject("peagle-tensors", ("peagle",), _one_of(safetensors_damaged, "*.safetensors"), targets.drafter, 1),
    Subject("dflash-config", ("dflash",), _one_of(json_damaged, "config.json"), targets.drafter, 1),
    Subject("dflash-tensors", ("dflash",), _one_of(safetensors_damaged, "*.safetensors"), targets.drafter, 1),
    Subject("torch-files", ("medusa-torch", "eagle3-torch"), _torch_files, targets.drafter, 3),
    Subject("npu-weights", ("npu",), _one_of(json_damaged, "weights.json"), targets.npu_weights, 1),
    Subject("npu-numbers", ("npu",), _one_of(damaged, "weights.bin"), targets.npu_weights, 1),
    Subject("tokenizers", ("tokenizer",), _one_of(json_damaged, "*.json"), targets.tokenizer, 3),
    Subject("tokenizers-written", ("tokenizer",), _one_of(json_damaged, "*.json"), targets.written_tokenizer, 2),
    Subject("templates", ("tokenizer",), _template, targets.tokenizer, 2),
)


def named(only: tuple[str, ...]) -> list[Subject]:
    """The subjects whose names match one of the patterns, as file names do; all if none is given."""
    return [one for one in SUBJECTS if not only or any(fnmatchcase(one.name, name) for name in only)]


def of_case(number: int, only: tuple[str, ...] = ()) -> Subject:
    """The subject of a case: every subject in turn, as often as its share says."""
    wheel = [subject for subject in named(only) for _ in range(subject.share)]
    return wheel[number % len(wheel)]
