"""Attacks: losses, goals, threats and steppers that compose into searches, and their names."""

from vitadel.attacks.parse import make
from vitadel.attacks.pgd import PGD
from vitadel.attacks.threats import L1, L2, Linf
from vitadel.attacks.wrappers import Restarts, WorstOf

__all__ = ["L1", "L2", "PGD", "Linf", "Restarts", "WorstOf", "make"]
