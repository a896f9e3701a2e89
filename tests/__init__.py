"""Tests; the tree mirrors ``omlx/``, and ``sim/`` holds the clock and the fakes."""
