"""Running a checkpoint: a decoder whose linear layers multiply packed weights."""
