"""Tests of the simulator and of the traffic tools."""
