"""Parse, call one verb, print: one file per verb."""
