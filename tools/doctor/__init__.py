"""The trials of `doctor --npu` on a machine with NPUs: probes, a plan of draftwood's own commands, and their report."""
