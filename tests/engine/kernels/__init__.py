"""Kernels against their plain forms."""
