"""Kernels run as numpy by Triton's interpreter, against their plain forms; see conftest.py."""
