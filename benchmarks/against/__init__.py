"""Another commit's build timed beside the checkout's: ``python -m benchmarks.against COMMIT``."""
