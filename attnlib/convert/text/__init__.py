"""Run a checkpoint over calibration text, one layer at a time."""
