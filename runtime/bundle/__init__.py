"""Opening a bundle: whatever does not hold together is refused before anything of it is used."""

from draftwood.runtime.bundle.opened import Bundle, Verify

__all__ = ["Bundle", "Verify"]
