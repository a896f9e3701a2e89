"""The kernel's promises."""
