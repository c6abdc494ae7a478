"""Training objectives: `(model, x, z, y) -> {"loss": ..., ...}`."""
