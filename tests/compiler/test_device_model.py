"""The analytic model against sums done by hand, the tiling's own rules, and the cost of a shape."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from draftwood.compiler.device import constants
from draftwood.compiler.device.devices import DEVICES, DeviceSpec, device, parts
from draftwood.compiler.device.operators import Op, attention, attention_tiles, matmul, of_texts
from draftwood.compiler.device.ranks import all_gather, on_ranks
from draftwood.compiler.device.steps import int8_draft, step_ops, step_s
from draftwood.compiler.device.table import DraftCost, modelled_table
from draftwood.compiler.drafters.eagle3.cost import Eagle3Cost
from draftwood.compiler.drafters.fasteagle.cost import FastEagleCost
from draftwood.compiler.drafters.medusa.cost import MedusaCost
from draftwood.compiler.drafters.medusa.network import MedusaConfig
from draftwood.compiler.teachers.checkpoint import expected_tensors
from draftwood.compiler.teachers.registry import read_config
from draftwood.errors import RequestError
from draftwood.tools.demo import resolve
from draftwood.trees.latency import Assumption, LatencyTable

B3 = DEVICES["ascend-910b3"]
HBM = 1.6 * 2**40 * 0.6  # bytes/s that the vendor's simulator expects of a 910B3
DIMS = read_config(resolve("shape:openpangu-embedded-7b"))


def seconds(ops: list[Op], on: DeviceSpec = B3) -> float:
    return math.fsum(parts(on, ops).values())


def weights(ops: list[Op]) -> float:
    """Parameters that products of up to 16 rows read: one padded row block is 2 * 16 FLOP a parameter."""
    return sum(op.count * op.cube / 32 for op in ops if op.engine == "matmul")


def test_a_step_reads_every_matrix_of_the_checkpoint_once() -> None:
    matrices = {n: s for n, s in expected_tensors(DIMS).items() if len(s) == 2 and n != "model.embed_tokens.weight"}
    assert weights(step_ops(DIMS, 16, 1024)) == sum(math.prod(shape) for shape in matrices.values())
    # 14.8 GB in bf16: the bound of every step, 14 ms.
    spent = parts(B3, step_ops(DIMS, 1, 128))
    assert spent["weights"] == pytest.approx(14.80e9 / HBM, rel=2e-3)  # activations of one row come on top


def test_attention_reads_the_whole_static_cache() -> None:
    # 34 layers, keys and values, 8 heads of 128, bf16: 139264 bytes a slot, and 8 mask bytes a layer.
    longer, shorter = (attention(DIMS, 1, slots).memory for slots in (3072, 2048))
    assert 34 * (longer - shorter) == 1024 * (139264 + 34 * 8)


@pytest.mark.parametrize(
    ("group", "rows", "slots", "tiles"),
    [
        # Group 4, inner KV tile 8192 capped by the KV length; M tiles of 512, 256, 128, 64, 32 rows.
        *((4, 16, slots, 1) for slots in (512, 1024, 2048, 4096)),
        *((4, rows, 8192, tiles) for rows, tiles in ((1, 1), (8, 1), (9, 2), (16, 2))),
        (4, 16, 32768, 2),
        # Above 16 rows the inner tile is 512 and the M tile too.
        *((4, rows, 8192, tiles) for rows, tiles in ((17, 1), (128, 1), (129, 2))),
        # Group 8: inner tile 4096, M tile 64. Group 16: 2048 and 128.
        *((8, rows, 8192, tiles) for rows, tiles in ((8, 1), (9, 2), (16, 2), (17, 1), (65, 2))),
        *((16, rows, 8192, tiles) for rows, tiles in ((8, 1), (9, 2), (17, 1), (33, 2))),
    ],
)
def test_tiles_follow_the_kernels_rules(group: int, rows: int, slots: int, tiles: int) -> None:
    assert attention_tiles(group, rows, slots) == tiles


def test_the_step_at_16_and_17_rows() -> None:
    times = {rows: step_s(B3, DIMS, rows, 8192) for rows in (8, 9, 16, 17)}
    again = 34 * 2 * 8 * 8192 * 128 * 2 / HBM  # keys and values a second time
    assert times[9] - times[8] == pytest.approx(again, rel=0.02)  # one more row costs a little besides
    assert times[16] - times[17] == pytest.approx(again, rel=0.02)
    short = {rows: step_s(B3, DIMS, rows, 1024) for rows in (8, 9, 16, 17)}
    assert short[8] < short[9] < short[16] < short[17] < 1.01 * short[8]


def test_the_cube_decides_past_the_ridge() -> None:
    # 294.9 TFLOPS at 0.7 over the stream at 0.6, 2 FLOP a weight of 2 bytes: 195.5 rows by hand. Reading and writing
    # the rows' activations shifts the ridge up by some rows.
    assert parts(B3, [matmul("m", 192, 4096, 4096)])["compute"] == 0
    assert parts(B3, [matmul("m", 224, 4096, 4096)])["weights"] == 0
    rows = [matmul("m", rows, 4096, 4096).cube for rows in (1, 16, 17, 32)]
    assert rows[0] == rows[1] == rows[2] / 2 == rows[3] / 2  # padded to 16


def test_half_the_bandwidth_is_twice_the_weights() -> None:
    b4 = parts(device("ascend-910b4"), step_ops(DIMS, 1, 1024))
    b3 = parts(B3, step_ops(DIMS, 1, 1024))
    assert b4["weights"] == 2 * b3["weights"] and b4["overhead"] == b3["overhead"]


def test_an_unknown_device_is_refused_in_one_line() -> None:
    with pytest.raises(RequestError, match=r"--device h100.*ascend-910b1, .*ascend-910c") as refused:
        device("h100")
    assert "\n" not in str(refused.value)


def drafts(drafter: DraftCost) -> dict[tuple[int, int], list[Op]]:
    return {(depth, width): ops for depth, width, ops in drafter.drafts(drafter.block(DIMS), 1024)}


def test_medusa_heads_stream_their_matrices() -> None:
    H, V = 4096, 153376
    ((shape, own),) = drafts(MedusaCost(levels=5)).items()
    ((_, tied),) = drafts(MedusaCost(levels=5, tied=True)).items()
    assert shape == (5, 16)
    (cut,) = drafts(MedusaCost.of_config(MedusaConfig(5, 1, False, vocabulary=8000))).values()
    assert weights(cut) == 5 * (H * H + H * 8000)
    assert weights(own) == 5 * (H * H + H * V) and weights(tied) == 5 * H * H + H * V


def test_an_eagle3_pass_is_a_layer_over_two_inputs_and_a_head() -> None:
    found = drafts(Eagle3Cost(vocabulary=32000, levels=4, widths=(1, 16)))
    assert set(found) == {(depth, width) for depth in (1, 2, 3, 4) for width in (1, 16)}
    # qkv over 2 x 4096 inputs, o, gate, up, down, head; the feature projection enters once.
    one = 8192 * 6144 + 4096 * 4096 + 3 * 4096 * 12800 + 4096 * 32000
    assert weights(found[1, 16]) == one + 3 * 4096 * 4096
    assert weights(found[4, 16]) == weights(found[1, 16]) + 3 * one
    assert seconds(found[4, 1]) < seconds(found[4, 16]) < 1.1 * seconds(found[4, 1])  # 16 rows are one fractal


@pytest.mark.parametrize(
    "cost", [Eagle3Cost(vocabulary=32000, levels=4, widths=(1,)), FastEagleCost(layers=5, vocabulary=32000)]
)
def test_a_drafter_in_int8_streams_half_of_what_is_rounded(cost: DraftCost) -> None:
    """Whatever the teacher is: its own layers say nothing of the drafter's. States enter in bf16."""
    deepest = {True: 0.0, False: 0.0}
    for int8 in deepest:
        ops = [op for _, _, found in cost.drafts(int8_draft(DIMS, int8), 1024) for op in found]
        deepest[int8] = sum(op.count * op.memory for op in ops if op.engine == "matmul")
    alone = 2 * 3 * 4096 * 4096 * (4 if isinstance(cost, Eagle3Cost) else 1)
    alone += 2 * 2 * 4096 * 4096 * isinstance(cost, FastEagleCost)
    assert deepest[True] - alone == pytest.approx((deepest[False] - alone) / 2, rel=1e-2)  # and some rows
    tables = [modelled_table(B3, DIMS, (1,), (1024,), cost, int8_drafter=int8) for int8 in (False, True)]
    drafts = [max(entry.seconds for entry in table.entries if entry.kind == "draft") for table in tables]
    assert 0.5 < drafts[1] / drafts[0] < 0.7 and tables[1].drafter["int8"] and "int8" not in tables[0].drafter


def test_fasteagle_is_one_pass_of_all_its_layers() -> None:
    ((shape, ops),) = drafts(FastEagleCost(layers=7, vocabulary=32000)).items()
    layer = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12800
    assert shape == (7, 16)
    assert weights(ops) == 7 * layer + 5 * 4096 * 4096 + 4096 * 32000
    (more,) = drafts(FastEagleCost(layers=7, vocabulary=32000, states=5)).values()
    assert weights(more) - weights(ops) == 2 * 4096 * 4096  # two states more to read


def test_narrow_fasteagle_layers_stream_less() -> None:
    narrow = FastEagleCost(layers=7, vocabulary=32000, heads=16, kv_heads=4, intermediate=2048)
    ((_, ops),) = drafts(narrow).items()
    layer = 4096 * 3072 + 2048 * 4096 + 3 * 4096 * 2048
    assert weights(ops) == 7 * layer + 5 * 4096 * 4096 + 4096 * 32000


def test_the_table_says_it_is_modelled_and_where_every_figure_comes_from() -> None:
    table = modelled_table(
        B3, DIMS, (1, 8, 17), (1024, 128), Eagle3Cost(vocabulary=32000), {"name": "p"}, prefill=(32,)
    )
    assert (table.source, table.kv_read, table.slots) == ("modelled", "static", (128, 1024))
    assert table.rows(1024) == (1, 8, 17) and table.drafter["kind"] == "eagle3"
    assert table.step_s(8, 1024) == step_s(B3, DIMS, 8, 1024)
    assert table.host_s() == pytest.approx(1.6e-4)
    memory = {entry.rows: entry.bytes for entry in table.entries if entry.slots == 1024}
    assert memory[17] > memory[1] > 0
    other = (*constants.LINKS, constants.AI_CPU_OVERHEAD, constants.AI_CPU_BANDWIDTH)  # nothing of ours runs there
    used = [c for c in vars(constants).values() if isinstance(c, Assumption) and c not in other]
    assert {constant.name for constant in used} <= {constant.name for constant in table.constants}
    assert all(constant.source and constant.unit for constant in table.constants)
    assert LatencyTable.from_json(table.to_json(), "t") == table


def test_shapes_that_do_not_fit_a_cache_are_left_out() -> None:
    table = modelled_table(B3, DIMS, (1, 127, 128, 300), (128, 512), prefill=(128,))
    assert table.rows(128) == (1, 127) and table.rows(512) == (1, 127, 128, 300)
    assert [(e.rows, e.slots) for e in table.entries if e.kind == "prefill"] == [(128, 512)]


def test_a_device_without_a_public_profile_says_so() -> None:
    table = modelled_table(device("ascend-910b1"), DIMS, (1,), (128,))
    assert table.constants[0].mark == "assumption" and "no public profile" in table.constants[0].source


def test_openpangu_is_read_as_it_is_written_here(tmp_path: Path) -> None:
    import json

    from draftwood.compiler.teachers.registry import read_config

    fields = {
        "architectures": ["PanguEmbeddedForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 12800,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 153376,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 16000000.0,
        "tie_word_embeddings": False,
        "bias": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 45892,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_config(tmp_path) == DIMS


def of_heads(ops: list[Op]) -> float:
    """Bytes of the attention and of rows written into caches."""
    return sum(op.count * op.memory for op in ops if op.name in ("attention", "scatter", "moved and new keys"))


def test_ranks_share_the_weights_and_meet_twice_a_layer() -> None:
    ops = step_ops(DIMS, 13, 1024)
    for ranks in (2, 4, 8):
        split = on_ranks(ops, DIMS, ranks)
        assert weights(split) == pytest.approx(weights(ops) / ranks)
        assert of_heads(split) == pytest.approx(of_heads(ops) / ranks)
        met = [op for op in split if op.engine == "link"]
        assert sum(op.count for op in met if op.name == "all-reduce") == 2 * DIMS.layers + 1  # and the embedding
        assert sum(op.count for op in met if op.name == "all-gather") == 1
    # A full mesh of 8 sends 196 GB/s at 0.7: 13 rows of 4096 in bf16 in 6 hops by doubling.
    (reduce,) = {op.sent for op in met if op.count == DIMS.layers}
    assert seconds([replace(met[1], count=1, sent=reduce)]) == pytest.approx(
        min(14 * 0.5e-6 + 2 * 7 / 8 * 106496 / 137.2e9, 6 * 0.5e-6 + 2 * 106496 / 137.2e9) + 10e-6
    )


def test_two_devices_of_a_mesh_have_one_link() -> None:
    size = 1e9
    two, eight = (seconds([all_gather(size, ranks)]) for ranks in (2, 8))
    assert two == pytest.approx(0.5 * size / (196e9 * 0.7 / 7), rel=2e-3)
    assert eight == pytest.approx(7 / 8 * size / (196e9 * 0.7), rel=2e-3)  # hops and the fixed cost on top


def test_a_table_of_ranks_says_so() -> None:
    table = modelled_table(B3, DIMS, [13], [1024], Eagle3Cost(vocabulary=32000), ranks=8)
    assert table.machine["ranks"] == 8 and "link efficiency" in {constant.name for constant in table.constants}
    alone = modelled_table(B3, DIMS, [13], [1024], Eagle3Cost(vocabulary=32000))
    assert "ranks" not in alone.machine and "link" not in alone.entries[0].parts
    assert all(one.seconds < other.seconds for one, other in zip(table.entries[:-1], alone.entries[:-1], strict=True))


def test_a_mixture_adds_up_once_for_all_experts_of_a_row() -> None:
    config = read_config(resolve("shape:qwen3-30b-a3b"))
    ops = step_ops(config, 13, 1024)
    split = on_ranks(ops, config, 4)
    sums = [op for op in split if op.name == "all-reduce" and op.count == config.layers]
    assert [op.sent[1][1] for op in sums] == [2 * 2 * 13 * config.hidden] * 2  # all of it twice, bf16
    streamed, whole = (
        sum(op.count * op.memory for op in some if op.name.startswith("experts")) for some in (split, ops)
    )
    assert streamed == pytest.approx(whole / 4)


def test_rows_of_several_texts_pass_the_weights_once_and_read_their_own_keys():
    one, four = (step_ops(DIMS, 4, 1024, texts=texts) for texts in (1, 4))
    for alone, together in zip(one, four, strict=True):
        assert (alone.name, alone.count) == (together.name, together.count)
        if alone.engine == "matmul":
            assert together.weights == alone.weights and together.rows == 4 * alone.rows
            # 16 rows of four texts fill the fractals that four rows of one are padded to.
            assert together.cube == alone.cube
            assert together.memory - together.weights == 4 * (alone.memory - alone.weights)
        else:
            assert (together.memory, together.vector, together.cube) == (
                4 * alone.memory,
                4 * alone.vector,
                4 * alone.cube,
            )
    assert of_texts(one, 1) == one
