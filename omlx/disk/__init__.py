"""The file layer of the SSD tier: blocks made, read, listed and removed. Called in threads."""
