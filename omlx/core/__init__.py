"""Decisions about requests: who runs, what is computed next, what text comes out. Pure Python."""
