"""`./run bench serve`: load on a whole server through its public API, and on other servers beside it."""
