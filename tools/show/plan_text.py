"""A plan in words: its choices, their expected gain, and the reasons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from draftwood.trees.plan_file import Cost, Plan, PlannedTree, Promise


def explanation(plan: Plan) -> str:
    """The contexts, the trees, the gears and the time per token; rival methods, the cost's staircase, and every node's
    gain."""
    parts = [_contexts(plan), _trees(plan), _baselines(plan)]
    parts += [_cost(plan, plan.cost), *_stairs(plan.cost)] if plan.cost else []
    parts += [_curve(plan), *(_nodes(tree) for tree in plan.trees if tree.paths)]
    return "\n\n".join(part for part in parts if part)


def _contexts(plan: Plan) -> str:
    numbers = plan.contexts
    how = "folds of whole texts are one observation each" if plan.grouped else "lines are taken as independent"
    return (
        f"contexts: trees from {numbers['counted']}, figures of expectation on"
        f" {numbers['heldout']} held out (95 % intervals: {how})"
    )


def _trees(plan: Plan) -> str:
    rows: list[Sequence[object]] = [("tree", "rows", "depth", "width", "counted", "held out", "95 % interval")]
    for tree in plan.trees:
        shape = tree.topology
        rows.append((tree.name, shape.rows, shape.depth, shape.width, *_lengths(tree.promise)))
    return "expected accept length, bonus counted; rows are the root and the draft nodes\n" + _table(rows)


def _lengths(promise: Promise) -> tuple[str, str, str]:
    heldout = promise.heldout
    interval = heldout.interval if heldout else None
    return (
        f"{promise.counted.tokens:.3f}",
        "-" if heldout is None else f"{heldout.tokens:.3f}",
        "-" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}",
    )


def _baselines(plan: Plan) -> str:
    if not plan.baselines:
        return ""
    rows: list[Sequence[object]] = [("method", "nodes", "depth", "counted", "held out", "95 % interval", "ms/token")]
    for baseline in plan.baselines:
        time = "-" if baseline.us_per_token is None else _ms(baseline.us_per_token)
        rows.append((baseline.name, baseline.nodes, baseline.depth, *_lengths(baseline.promise), time))
    title = "other methods on the same contexts, with at most as many nodes as the largest planned tree"
    return title + "\n" + _table(rows)


def _cost(plan: Plan, cost: Cost) -> str:
    if cost.exact:
        verdict = f"no other set of at most {plan.limits.gears} of {cost.candidates} candidates is faster"
    else:
        verdict = f"no set of the {cost.candidates} candidates gets below {_ms(cost.bound)} ms: a proven bound"
    lines = [
        f"gears, by a {cost.source} latency table, plain decoding among them: {len(plan.gears)}; {verdict}",
        _served(plan, cost),
        *([_rivals(cost)] if _rivals(cost) else []),
        f"expected: {_speedup(cost.us_per_token, cost.plain_us_per_token)}, on counted contexts",
    ]
    if cost.heldout is not None and cost.plain_heldout is not None:
        lines.append(f"          {_speedup(cost.heldout, cost.plain_heldout)}, on held-out ones")
    if cost.too_long:
        lines.append(f"left out: {cost.too_long} counted contexts longer than the table's largest KV length holds")
    return "\n".join(lines)


def _served(plan: Plan, cost: Cost) -> str:
    """The gears by number and length of texts, and the time of a token."""
    gears = {gear.name: gear for gear in plan.gears}
    rows: list[Sequence[object]] = [
        ("texts", "contexts need", "share", "served by", "KV", "ms/token", "plain ms/token")
    ]
    for share in cost.served:
        trees = " | ".join(gears[name].tree for name in share.gears)
        slots, times = max(gears[name].slots for name in share.gears), (share.us_per_token, share.plain_us_per_token)
        rows.append((share.texts, f"KV length {share.slots}", f"{share.share:.0%}", trees, slots, *map(_ms, times)))
    return _table(rows)


def _rivals(cost: Cost) -> str:
    """Goodput next to that of others; nothing if a launch takes one text."""
    if {rival.texts for rival in cost.rivals} == {1}:
        return ""
    rows: list[Sequence[object]] = [
        (
            "texts",
            "share",
            "tokens/s",
            "ms/token of a text",
            "over plain batches",
            "chains",
            "one text's plan",
        )
    ]
    for rival in cost.rivals:
        us = rival.us_per_token
        over = (rival.plain_us_per_token / us, rival.chains_us_per_token / us, rival.single_us_per_token / us)
        rows.append(
            (
                rival.texts,
                f"{rival.share:.0%}",
                f"{1e6 / us:.0f}",
                _ms(rival.texts * us),
                *(f"{ratio:.2f}" for ratio in over),
            )
        )
    return "goodput of all texts; chains have the best length for each number of texts\n" + _table(rows)


def _speedup(us: float, plain_us: float) -> str:
    return f"{_ms(us)} ms a token, {plain_us / us:.2f} times plain decoding"


def _stairs(cost: Cost) -> Iterable[str]:
    """Per KV length: a step's cost at each row count, the best tree's gain there, and the optimum."""
    for texts, slots in sorted({(stair.texts, stair.slots) for stair in cost.stairs}):
        level = [stair for stair in cost.stairs if (stair.texts, stair.slots) == (texts, slots)]
        best = min(level, key=lambda stair: stair.us_per_token)
        slowest = max(stair.us for stair in level)
        rows: list[Sequence[object]] = [("rows", "ms/step", "tokens", "ms/token", "cost of a step")]
        for stair in level:
            bar = "#" * round(30 * stair.us / slowest) + ("  <- least time per token" if stair is best else "")
            rows.append((stair.rows, _ms(stair.us), f"{stair.expected:.3f}", _ms(stair.us_per_token), bar))
        at = f"of {texts} texts at" if texts > 1 else "at"
        yield f"cost staircase {at} KV length {slots}: rows up to the next stair are free\n{_table(rows)}"


def _curve(plan: Plan) -> str:
    """Best accept length at 1, 2, 4, ... nodes, and the gain of the last node there."""
    curve, heldout = plan.curve, plan.curve_heldout
    rows: list[Sequence[object]] = [("nodes", "counted", "gain of the last node", "held out")]
    sizes = sorted({2**i for i in range(len(curve).bit_length()) if 2**i < len(curve)} | {len(curve) - 1})
    for n in sizes:
        out = f"{heldout[n]:.3f}" if heldout else "-"
        rows.append((n, f"{curve[n]:.3f}", f"{curve[n] - curve[n - 1]:.4f}", out))
    return "best expected accept length by size; every larger tree contains the smaller ones\n" + _table(rows)


def _nodes(tree: PlannedTree) -> str:
    """The nodes of a tree by their gain; long trees in part."""
    counted, heldout = tree.counted_shares, tree.heldout_shares
    order = sorted(range(len(counted)), key=lambda i: (-counted[i], len(tree.paths[i]), tree.paths[i]))
    rows: list[Sequence[object]] = [("node", "gain", "held out", "")]
    listed = order if len(order) <= 24 else order[:16] + order[-8:]
    for i in listed:
        out = "-" if heldout is None else f"{heldout[i]:.4f}"
        rows.append((tree.paths[i], f"{counted[i]:.4f}", out, "#" * round(30 * counted[i])))
    left = (
        f" (the {len(order) - len(listed)} between the first 16 and the last 8 left out)" if listed is not order else ""
    )
    return f"{tree.name}: what each node gains, the share of contexts whose truth passes it{left}\n{_table(rows)}"


def _ms(us: float) -> str:
    return f"{us / 1000:.3f}"


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
