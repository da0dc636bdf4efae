"""The router: admits, tokenises, places and dispatches requests."""
