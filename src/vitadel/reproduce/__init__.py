"""Reproduce the tables and figures of the papers: plan, train, evaluate, compare."""
