"""Tests of models that several processes compute."""
