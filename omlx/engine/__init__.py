"""Everything that computes with MLX; all of it runs on the engine thread.

Shapes are written with B rows of a batch, L layers of a group, H KV heads, T tokens, D head size.
Nothing here makes a stream or an array at import: streams belong to the thread that made them.
"""
