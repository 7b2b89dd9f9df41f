"""Extensions of polyquant: codec.py, format.py and architecture.py, each registered by one line in pyproject.toml."""
