"""What is put on a frozen model, kept in files of its own, and found again when the model is opened."""
