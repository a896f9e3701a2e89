"""A clock that jumps, and fakes that obey the contracts of what they stand for."""
