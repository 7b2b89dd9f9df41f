"""The verbs: plan, execute, convert, validate, compare."""
