"""What a model computes on a text: inputs of its layers, their ranges, Hessians and importance."""
