"""What all tasks have in common: trainer, checkpoints, search, sweep, records, report. It knows no task."""
