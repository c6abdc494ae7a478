"""Recipes: documents, their sections, and what is built from them."""
