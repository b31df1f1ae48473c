"""Inside the training process: attach, steps, reports. Never blocks, never raises into training."""
