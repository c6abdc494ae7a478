"""What is added to a frozen model: each file one method, with only its own parameters to train and to save."""
