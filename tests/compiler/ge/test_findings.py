"""Findings of audits of the NPU's graphs, each with the test that fails without its repair."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
GE, ACL = "compiler/ge/test_", "runtime/engines/acl/test_"
# Finding -> tests, "file:name" each.
FINDINGS = {
    "F1 tensors made without a device fail the first trace on one": (
        "compiler/test_devices.py:test_every_step_runs_on_another_device",
        "compiler/test_devices.py:test_no_step_makes_a_tensor_without_a_device",
    ),
    "F2 RotaryMul got three dimensions, and only the attention had rules": (
        f"{GE}operator_rules.py:test_broken_rules",
        f"{GE}element_types.py:test_what_the_table_lacks_is_no_kernel",
        f"{GE}operator_rules.py:test_an_operator_that_nobody_read_about_is_a_finding",
    ),
    "F3 steps of one code object deleted each other's compiled graph": (
        f"{GE}online.py:test_every_step_keeps_its_compiled_graph",
    ),
    "F4 .om files had no runner, and each its own weights": (
        f"{ACL}decoding.py:test_the_tokens_are_those_of_the_interpreter",
        f"{ACL}decoding.py:test_weights_lie_on_the_device_once",
        f"{ACL}decoding.py:test_a_step_allocates_nothing",
        f"{ACL}contract.py:test_a_fault_in_the_engine_is_found",
    ),
    "F5 the least CANN was not said": (
        f"{GE}target.py:test_a_bundle_for_the_npu_alone",
        "test_versions.py:test_the_newest_feature_decides",
    ),
    "F5 torch_npu was never imported": (f"{GE}online.py:test_the_engine_loads_torch_npu_itself",),
    "the graph of a device was not the one that was proved": (
        f"{GE}online.py:test_the_graph_of_a_device_is_the_one_that_was_proved",
    ),
    "a device worked a tree's tables out at every launch, where the file has the results": (
        f"{GE}whole.py:test_a_device_makes_the_graph_that_was_proved",
    ),
    "S1 gathers where views do": (f"{GE}kernels.py:test_a_layer_is_12_kernels_and_turns_nothing_around",),
    "S2 caches head by head: Transposes, many small rows": (
        f"{GE}kernels.py:test_every_cache_is_written_once_by_whole_rows",
        f"{GE}kernels.py:test_new_rows_join_moved_ones_without_a_kernel",
        f"{GE}kernels.py:test_torchairs_own_protobuf_counts_the_same",
    ),
    "S3 the latency model listed fewer kernels than the graph": (
        f"{GE}kernels.py:test_the_latency_model_lists_what_the_graph_lists",
    ),
    "S4 logits went to the host at every step": (
        f"{GE}whole.py:test_less_than_four_kilobytes_cross",
        "tools/test_npu.py:test_inspect_shows_every_graph",
    ),
    "S5 which addresses are fixed": (f"{GE}online.py:test_weights_have_fixed_addresses_and_nothing_else",),
    "the attention may depend on no value of the host": (
        f"{GE}constraints.py:test_a_baked_length",
        f"{GE}constraints.py:test_a_value_that_does_not_follow_its_input",
    ),
    "bf16 ReduceLogSumExp has no kernel and is widened": (f"{GE}operators.py:test_log_sum_exp_rounds_once",),
    "TopK leaves the order of ties open: what is drafted decides no token, and a draw in doubt is the host's": (
        "runtime/speculation/test_lossless.py:test_every_tree_of_up_to_five_nodes_gives_the_plain_text",
        "compiler/test_accept.py:test_a_sure_draw_is_the_hosts",
    ),
    "weights lie row by row, not NZ": (
        f"{GE}constraints.py:test_a_weight_that_is_declared_in_another_layout_than_its_bytes",
    ),
    "converters put copies before ApplyRotaryPosEmb": (
        f"{GE}kernels.py:test_keys_that_are_normed_are_joined_by_a_kernel",
        f"{GE}operator_rules.py:test_a_value_that_is_written_over_has_one_reader",
    ),
    "W8A8 left a Transpose": (f"{GE}quantised.py:test_graphs_hold_whole_numbers_and_turn_nothing_around",),
    "N1 TopK's count was int64: the AI CPU; N6 slices had no kernel": (
        f"{GE}element_types.py:test_where_a_node_runs",
        "tools/test_shapes.py:test_all_runs_on_the_ai_core",
        f"{GE}element_types.py:test_nothing_runs_on_the_ai_cpu_and_no_cast_is_added",
    ),
    "N2 rules looked at the first operand alone": (
        f"{GE}element_types.py:test_where_a_node_runs",
        f"{GE}element_types.py:test_what_is_said_of_a_node_names_engine_price_and_source",
    ),
    "N3 pairs of torch_npu and CANN, and chips that run nothing": (
        "tools/doctor/test_doctor.py:test_which_engine_a_machine_can_run",
    ),
    "N4 passes that act where torch_npu can be imported": (
        f"{GE}online.py:test_the_graph_of_a_device_is_the_one_that_was_proved",
        f"{GE}online.py:test_another_graph_than_the_proved_one_is_not_compiled",
    ),
    "N7 a copy an input, guards at every launch": (
        f"{GE}online.py:test_a_step_crosses_once_each_way",
        f"{GE}online.py:test_guards_are_for_the_first_launch_alone",
    ),
    "N8 a first failure was blind": (f"{GE}online.py:test_what_cannot_be_compiled_names_its_logs",),
    "N9 probes tried another layout than the graphs have": (
        "tools/doctor/test_npu_probe.py:test_the_attention_is_tried_as_the_graphs_have_it",
        "tools/doctor/test_npu_probe.py:test_each_probe_sees_a_result_that_is_wrong",
    ),
    "N10 the line for ATC ran in one folder alone and told no memory; N11 joins are free if GE lays them out": (
        "tools/test_npu.py:test_inspect_shows_every_graph",
    ),
    "N5 bf16 biases of bf16 products were cast": (
        f"{GE}element_types.py:test_nothing_runs_on_the_ai_cpu_and_no_cast_is_added",
        f"{GE}weights.py:test_biases_of_bf16_products_lie_in_float32",
    ),
    "P1 beside a loaded torch_npu no reference computed on a CPU's tensors": (
        "kernels/test_beside_torch_npu.py:test_every_probe_has_a_reference",
    ),
    "P2 what was documented did not import beside a machine's torch": (
        "kernels/test_without_onnx.py:test_the_modules_of_a_device_need_no_onnx",
        "test_draft.py:test_next_to_the_machines_torch_npu_nothing_is_pinned",
        "test_draft.py:test_an_environment_stands_on_a_python_with_torch_npu",
    ),
    "P3 what equals a default was read from where it is left out": (
        f"{GE}quantised.py:test_norms_with_the_operators_own_epsilon",
        f"{GE}quantised.py:test_what_breaks_a_rule_of_rounding_operators_is_found",
    ),
    "P4 bundles of torch_npu 2.13 were refused by 2.9": (
        f"{GE}releases.py:test_topk_has_no_attribute_that_no_cann_knows",
    ),
    "P5 a build's number, or a layout's, was taken for CANN's release": (
        "test_environment.py:test_the_release_of_cann",
        "test_versions.py:test_older_torches_have_a_torch_npu_for_every_cann",
    ),
    "P6 an hour that was cut off left nothing, and tried neither EAGLE-3 nor real widths": (
        "tools/doctor/test_npu_probe.py:test_a_killed_doctor_leaves_what_it_has_found",
        "tools/doctor/test_npu_probe.py:test_a_failed_step_ends_nothing_but_what_needs_it",
        "tools/doctor/test_npu_probe.py:test_what_is_not_begun_in_time_is_left_out",
        "tools/doctor/test_npu_probe.py:test_the_steps_are_draftwoods",
    ),
    "P7 a device that takes no record did not say why": (
        f"{GE}captured.py:test_a_device_that_takes_no_record_is_told_what_helps",
    ),
    "P8 weights of acl lay at multiples of 64 bytes": (
        f"{ACL}memory.py:test_weights_begin_at_512_bytes_wherever_the_block_does",
    ),
    "P10 operands were described by the trace's types": (
        f"{GE}lowering.py:test_operands_are_described_as_inputs_and_weights_lie",
    ),
    "collectives lower offline, but not for ATC": (
        "tools/test_ranks.py:test_two_ranks_interpreted_together_decode_one_text",
        "tools/test_ranks.py:test_processes_decode_what_one_rank_does",
        "tools/test_ranks.py:test_a_rank_that_is_lost_ends_all",
        f"{GE}lockstep.py:test_rules_of_collectives",
    ),
}


@pytest.mark.parametrize("finding", FINDINGS)
def test_each_finding_has_its_tests(finding: str) -> None:
    for place in FINDINGS[finding]:
        file, _, name = place.partition(":")
        tree = ast.parse((TESTS / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, place
