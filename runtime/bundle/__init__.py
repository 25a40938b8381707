"""Opening a bundle: a bundle whose parts contradict each other is refused before anything of it is used."""

from draftwood.runtime.bundle.opened import Bundle, Verify

__all__ = ["Bundle", "Verify"]
