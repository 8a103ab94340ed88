"""What a training loop calls: models, batch norm, join, prepare, seeds."""
