"""Speed and memory of the engines, as ratios to a loop written by hand, in one process and one run."""
