"""What `doctor --npu` tries on a machine with NPUs: probes, a plan of draftwood's own commands, and their report."""
