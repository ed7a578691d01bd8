"""The life of a request: schedule, pack, run, sample, answer."""
