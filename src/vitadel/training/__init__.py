"""Make a model robust: objectives, plug-ins around them, and the one training loop."""
