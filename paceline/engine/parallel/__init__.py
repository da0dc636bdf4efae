"""A model that several processes of one worker compute together, each a part of its heads or some of its layers (docs/parallel.md)."""
