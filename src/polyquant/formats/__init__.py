"""One package per format, behind two protocols: `protocol.Format` (sniff, open, check) and `protocol.Target` (choose, prepare, lay out)."""
