"""The sections, a file each; `draftwood.tools.evaluate.registry` lists them."""
