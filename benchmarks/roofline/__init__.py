"""`./run bench roofline`: what this machine could do at most, and how much of it our steps reach."""
