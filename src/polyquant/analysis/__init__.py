"""What a checkpoint is and how good: inspect, validate, compare, evaluate."""
