"""Paceline: what the services share, and what a Python client imports."""
