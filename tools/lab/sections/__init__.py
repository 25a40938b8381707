"""The sections, a file each; `draftwood.tools.lab.registry` lists them."""
