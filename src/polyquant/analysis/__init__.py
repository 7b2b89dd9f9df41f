"""Analysis of checkpoints: inspect, validate, compare, evaluate."""
