"""What a terminal shows of a run: the live view, tables, and trackers for other programs."""
