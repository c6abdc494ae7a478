"""Attacks that look for the nearest adversarial point: DDN, FMN, DeepFool, and a bisection over budgets."""
