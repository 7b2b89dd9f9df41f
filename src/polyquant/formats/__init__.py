"""One room per format: sniff, open, lay_out, check."""
