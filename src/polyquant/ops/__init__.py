"""Pure array functions: each a numpy reference, with a native counterpart where speed matters."""
