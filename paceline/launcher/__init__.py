"""One command brings up a local cluster."""
