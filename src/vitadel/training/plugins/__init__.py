"""Plug-ins around training steps and epochs, with the methods of `vitadel.training.interfaces`."""
