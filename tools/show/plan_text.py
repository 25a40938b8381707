"""A plan in words: what was chosen, what it is expected to gain, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def summary(plan: dict[str, Any]) -> str:
    """The contexts, the trees, the gears and the time per token, from the plan's plain values."""
    return "\n\n".join([_contexts(plan), _trees(plan), *_cost(plan), *_realised(plan)])


def explanation(plan: dict[str, Any]) -> str:
    """The same and why: shrinkage, rival methods, the cost's staircase, and every node's gain."""
    parts = [_contexts(plan), _shrinkage(plan), _classes(plan), _trees(plan), _baselines(plan)]
    parts += [*_cost(plan), *_stairs(plan), _curve(plan), *(_nodes(tree) for tree in plan["trees"] if tree["paths"])]
    return "\n\n".join([part for part in parts if part] + _realised(plan))


def _contexts(plan: dict[str, Any]) -> str:
    numbers = plan["contexts"]
    how = "folds of whole texts are one observation each" if plan["grouped"] else "lines are taken as independent"
    return (
        f"contexts: trees from {numbers['counted']}, settings from {numbers['tuning']}, figures of expectation on"
        f" {numbers['heldout']} held out (95 % intervals: {how})"
    )


def _shrinkage(plan: dict[str, Any]) -> str:
    shrinkage = plan["shrinkage"]
    if not shrinkage["tried"]:
        return "shrinkage: none, for no contexts were left to choose it on; rare paths count as they were counted"
    tried = ", ".join(f"{one['strength']}: {one['tuning']:.4f}" for one in shrinkage["tried"])
    verdict = (
        f"strength {shrinkage['strength']} gains most on tuning contexts, by more than its standard error"
        if shrinkage["strength"]
        else "bare counts are kept, for no strength is better by more than the standard error of the difference"
    )
    return f"shrinkage towards the product model: {verdict}\n  mean accept length on tuning contexts: {tried}"


def _classes(plan: dict[str, Any]) -> str:
    if not plan["classes"]:
        return ""
    bounds = ", ".join(f"{bound:.3f}" for bound in plan["classes"])
    return (
        f"confidence classes: {len(plan['classes']) + 1}, from a root confidence of {bounds} on; their trees have"
        " equally many rows, so one verify graph serves all"
    )


def _trees(plan: dict[str, Any]) -> str:
    rows = [("tree", "rows", "depth", "width", "counted", "held out", "95 % interval")]
    for tree in plan["trees"]:
        rows.append((tree["name"], tree["rows"], tree["depth"], tree["width"], *_lengths(tree["expected"])))
    return "expected accept length, bonus counted\n" + _table(rows)


def _lengths(expected: dict[str, Any]) -> tuple[str, str, str]:
    interval = expected["heldout_interval"]
    return (
        f"{expected['counted']:.3f}",
        "-" if expected["heldout"] is None else f"{expected['heldout']:.3f}",
        "-" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}",
    )


def _baselines(plan: dict[str, Any]) -> str:
    if not plan["baselines"]:
        return ""
    rows = [("method", "nodes", "depth", "counted", "held out", "95 % interval", "ms/token")]
    for one in plan["baselines"]:
        seconds = one["seconds_per_token"]
        cells = (one["name"], one["nodes"], one["depth"], *_lengths(one["expected"]))
        rows.append((*cells, "-" if seconds is None else _ms(seconds)))
    title = "other methods on the same contexts, with at most as many nodes as the largest planned tree"
    return title + "\n" + _table(rows)


def _cost(plan: dict[str, Any]) -> list[str]:
    cost = plan["cost"]
    if cost is None:
        return []
    rows = [("contexts need", "share", "served by", "KV", "ms/token", "plain ms/token")]
    for one in cost["served"]:
        gear = plan["gears"][one["gear"]]
        names, times = (
            "+".join(dict.fromkeys(gear["trees"])),
            (one["seconds_per_token"], one["plain_seconds_per_token"]),
        )
        rows.append((f"KV length {one['slots']}", f"{one['share']:.0%}", names, gear["slots"], *map(_ms, times)))
    speedup = cost["plain_seconds_per_token"] / cost["seconds_per_token"]
    if cost["exact"]:
        verdict = f"no other set of at most {plan['limits']['gears']} of {cost['candidates']} candidates is faster"
    else:
        verdict = f"no set of the {cost['candidates']} candidates gets below {_ms(cost['bound'])} ms: a proven bound"
    lines = [
        f"gears, by a {cost['source']} latency table: {len(plan['gears'])}, plain decoding counted; {verdict}",
        _table(rows),
        f"expected: {_ms(cost['seconds_per_token'])} ms a token, {speedup:.2f} times plain decoding, on counted ones",
    ]
    if cost["heldout"] is not None:
        speedup = cost["plain_heldout"] / cost["heldout"]
        lines.append(
            f"          {_ms(cost['heldout'])} ms a token, {speedup:.2f} times plain decoding, on held-out ones"
        )
    if cost["too_long"]:
        lines.append(f"left out: {cost['too_long']} counted contexts longer than the table's largest KV length holds")
    return ["\n".join(lines)]


def _stairs(plan: dict[str, Any]) -> list[str]:
    """Per KV length: what a step costs at each row count, what the best tree gains there, where the optimum lies."""
    if plan["cost"] is None:
        return []
    found = []
    stairs = plan["cost"]["stairs"]
    for slots in sorted({stair["slots"] for stair in stairs}):
        level = [stair for stair in stairs if stair["slots"] == slots]
        best = min(level, key=lambda stair: stair["seconds_per_token"])
        slowest = max(stair["seconds"] for stair in level)
        rows = [("rows", "ms/step", "tokens", "ms/token", "cost of a step")]
        for stair in level:
            bar = "#" * round(30 * stair["seconds"] / slowest) + ("  <- least time per token" if stair is best else "")
            cells = (stair["rows"], _ms(stair["seconds"]), f"{stair['expected']:.3f}", _ms(stair["seconds_per_token"]))
            rows.append((*cells, bar))
        found.append(f"cost staircase at KV length {slots}: rows up to the next stair are free\n{_table(rows)}")
    return found


def _curve(plan: dict[str, Any]) -> str:
    """Best accept length at 1, 2, 4, ... nodes, and what the last node there adds."""
    curve, heldout = plan["curve"], plan["curve_heldout"]
    rows = [("nodes", "counted", "gain of the last node", "held out")]
    sizes = sorted({2**i for i in range(len(curve).bit_length()) if 2**i < len(curve)} | {len(curve) - 1})
    for n in sizes:
        out = f"{heldout[n]:.3f}" if heldout else "-"
        rows.append((n, f"{curve[n]:.3f}", f"{curve[n] - curve[n - 1]:.4f}", out))
    return "best expected accept length by size; every larger tree contains the smaller ones\n" + _table(rows)


def _nodes(tree: dict[str, Any]) -> str:
    """The nodes of a tree by what they gain; long trees in part."""
    counted, heldout = tree["shares"]["counted"], tree["shares"]["heldout"]
    order = sorted(range(len(counted)), key=lambda i: (-counted[i], len(tree["paths"][i]), tree["paths"][i]))
    rows = [("node", "gain", "held out", "")]
    shown = order if len(order) <= 24 else order[:16] + order[-8:]
    for i in shown:
        out = "-" if heldout is None else f"{heldout[i]:.4f}"
        path = "(" + ", ".join(map(str, tree["paths"][i])) + ("," if len(tree["paths"][i]) == 1 else "") + ")"
        rows.append((path, f"{counted[i]:.4f}", out, "#" * round(30 * counted[i])))
    left = (
        f" (the {len(order) - len(shown)} between the first 16 and the last 8 left out)" if shown is not order else ""
    )
    return f"{tree['name']}: what each node gains, the share of contexts whose truth passes it{left}\n{_table(rows)}"


def _realised(plan: dict[str, Any]) -> list[str]:
    """Beside each gear of a run what was expected of its tree, known by the gear's name."""
    if "realised" not in plan:
        return []
    trees = {tree["name"]: tree["expected"] for tree in plan["trees"]}
    rows = [("gear", "steps", "realised", "counted", "held out", "95 % interval")]
    for one in plan["realised"]:
        expected = trees.get(one["gear"].rpartition("-kv")[0])
        lengths = _lengths(expected) if expected else ("-", "-", "-")
        rows.append((one["gear"], one["steps"], f"{one['accept_length']:.3f}", *lengths))
    return ["accept length of a run and what was expected of its trees\n" + _table(rows)]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f}"


def _table(rows: Iterable[Sequence[object]]) -> str:
    """Rows in columns, the first to the left and numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        first, *rest = (
            cell.ljust(width) if i == 0 or cell.startswith("#") else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  " + "  ".join([first, *rest]).rstrip())
    return "\n".join(lines)
