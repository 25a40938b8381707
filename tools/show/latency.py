"""A latency table for people."""

from __future__ import annotations

from draftwood.trees.latency import LatencyTable


def table_text(table: LatencyTable) -> str:
    """The table for people: for each number of texts ms by rows and KV length, then the draft and the host."""
    machine = table.machine.get("device") or table.machine.get("model")
    by = ", engine bitwise" if table.machine.get("engine") == "bitwise" else ""
    lines = [f"{table.source} on {machine}{by}, ms a step"]
    for texts in table.texts:
        lines += [*([f"{texts} texts a launch"] if table.texts != (1,) else []), *_of_texts(table, texts)]
    return "\n".join([*lines, *table.notes])


def _of_texts(table: LatencyTable, texts: int) -> list[str]:
    """The lines of launches of ``texts`` texts."""
    rows = sorted({count for length in table.slots for count in table.rows(length, texts)})
    lines = [f"{'rows':>6}" + "".join(f"  kv {c:>6}" for c in table.slots)]
    for count in rows:
        known = (count in table.rows(c, texts) for c in table.slots)
        times = zip(known, table.slots, strict=True)
        cells = (f"{1000 * table.step_s(count, c, texts):11.3f}" if there else " " * 11 for there, c in times)
        lines.append(f"{count:6}" + "".join(cells))
    drafts = [entry for entry in table.entries if entry.kind == "draft" and entry.texts == texts]
    for width in sorted({entry.width for entry in drafts}):
        by_depth = ", ".join(f"{e.depth}: {1000 * e.seconds:.3f}" for e in drafts if e.width == width)
        lines.append(f"draft of width {width}, by depth {by_depth}")
    return [*lines, f"host  {1000 * table.host_s(texts):.3f} ms a step"]
