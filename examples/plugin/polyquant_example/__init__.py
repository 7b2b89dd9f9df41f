"""What a package can bring to polyquant: codec.py, format.py and architecture.py, each found by one line in pyproject.toml."""
