"""The prefix table: which worker holds which block. A hint, never trusted: the worker's own look-up decides."""
