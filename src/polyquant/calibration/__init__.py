"""Statistics of a model on a calibration text: layer inputs, their ranges, Hessians and importance."""
