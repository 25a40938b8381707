"""The sections, a file each; `draftwood.tools.benchmarks.registry` lists them."""
