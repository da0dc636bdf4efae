"""The Triton kernels, without a GPU: their arithmetic in the interpreter, and whether they compile for real ones."""
