"""Formats, one package each, with two protocols: `protocol.Format` (sniff, open, check) and `protocol.Target` (choose,
prepare, lay out).
"""
