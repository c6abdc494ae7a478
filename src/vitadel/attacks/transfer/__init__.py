"""Attacks that are crafted on one model to fool another."""
