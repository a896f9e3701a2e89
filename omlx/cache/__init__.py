"""The cache's decisions: what is stored where, what is found, what goes first. Pure Python."""
