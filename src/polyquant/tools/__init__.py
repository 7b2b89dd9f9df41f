"""Commands with the names that the Trellis v3 document gives them: python -m polyquant.tools.NAME. Exit codes as of `polyquant`."""
