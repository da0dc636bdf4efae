"""A cluster on a virtual clock: the real scheduler, block pool and placement, and a cost model where a model would be."""
