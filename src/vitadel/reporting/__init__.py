"""Reporting: reads run folders and shows them; imports no torch."""
