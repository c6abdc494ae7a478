"""Checks of the diagnosis, by symptom."""
