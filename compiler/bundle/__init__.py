"""From a request to a frozen bundle."""
