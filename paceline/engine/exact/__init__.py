"""Exact mode: the bits of a request depend on nothing but the request."""
