"""What training minimises: each file one objective, `(model, x, z, y) -> {"loss": ..., ...}`."""
