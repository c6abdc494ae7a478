"""What goes around a training step or an epoch: each file one plug-in, of the shapes in `defenses.protocols`."""
