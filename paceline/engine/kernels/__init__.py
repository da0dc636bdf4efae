"""Attention and its like in code that is made for one kind of processor; each equals a plain torch form, and stands in for it."""
