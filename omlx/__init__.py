"""An LLM inference server for MLX that never computes a prefix twice."""

__version__ = "0.1.0"
