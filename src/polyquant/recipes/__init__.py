"""Which codec each tensor gets: mixes by name and rules."""
