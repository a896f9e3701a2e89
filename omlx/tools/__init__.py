"""Tools for the files of the SSD tier. They import no MLX, and run where it does not."""
