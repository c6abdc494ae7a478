"""Adapters: what a training trains and saves, the whole model or a small addition to a frozen one."""
