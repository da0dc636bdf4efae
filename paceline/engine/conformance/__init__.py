"""Conformance: every path through the engine gives the logits of the plain transformers forward pass."""
