"""The version of this package, which bundles and caches note."""

__version__ = "0.1.0"
