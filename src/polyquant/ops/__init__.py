"""Pure array functions: each a numpy reference with, where it pays, a native twin."""
