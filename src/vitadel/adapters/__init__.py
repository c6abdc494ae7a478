"""What is added to a frozen classifier: robustness tokens and the adapters of TORA."""
