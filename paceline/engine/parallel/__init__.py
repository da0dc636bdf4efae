"""A model that several processes of one worker compute together, each a part of its heads (docs/parallel.md)."""
