"""Running a checkpoint: a decoder whose linears multiply the packed parts."""
