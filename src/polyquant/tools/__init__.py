"""Commands with the names of the Trellis v3 specification: python -m polyquant.tools.NAME.

Exit codes as for `polyquant`.
"""
